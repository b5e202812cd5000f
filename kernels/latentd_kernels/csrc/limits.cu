// Limits of slots on their way from the host to the sampler.
#include "limits.cuh"

constexpr int kThreads = 256;

// kernel place_limits: copies changed limits into the seats of their slots.
// shapes: changes [count, seat_words] and slots [count] int32 in mapped host memory, seats [max_slots, seat_words]
// int32;
//   only what a seat's header says is there is copied
// rounds: none
// launch: grid (count, 1, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kThreads)
    place_limits(const uint32_t* changes, const int* slots, uint32_t* seats, int seat_words) {
  pdl_launch();
  pdl_wait();
  const uint32_t* from = changes + static_cast<long long>(blockIdx.x) * seat_words;
  uint32_t* to = seats + static_cast<long long>(slots[blockIdx.x]) * seat_words;
  const int bias_words = 2 * from[0], mask_end = from[1] != 0 ? seat_words - 2 * kMaxBias : kLimitHeader;
  for (int i = threadIdx.x; i < mask_end; i += kThreads) to[i] = from[i];
  const int bias = seat_words - 2 * kMaxBias;
  for (int i = threadIdx.x; i < bias_words; i += kThreads) to[bias + i] = from[bias + i];
}
