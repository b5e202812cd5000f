// Limits of slots on their way from the host to the sampler.
#include "limits.cuh"

constexpr int kThreads = 256;
constexpr int kTogether = 8;  // loads of a thread in one trip over the bus

LATENTD_DEVICE void copy_vectors(const uint4* from, uint4* to, int count) {
  for (int base = threadIdx.x; base < count; base += kThreads * kTogether) {
    uint4 v[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (base + i * kThreads < count) v[i] = from[base + i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (base + i * kThreads < count) to[base + i * kThreads] = v[i];
    }
  }
}

// kernel place_limits: copies changed limits into the seats of their slots.
// shapes: changes [count, seat_words] and slots [count] int32 in mapped host memory, seats [max_slots, seat_words]
// int32;
//   only what a seat's header says is there is copied, and seat_words is a multiple of 4
// rounds: none
// launch: grid (count, 1, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kThreads)
    place_limits(const uint4* changes, const int* slots, uint4* seats, int seat_words) {
  pdl_launch();
  pdl_wait();
  const int seat_vectors = seat_words / 4, bias = seat_vectors - kMaxBias / 2;
  const uint4* from = changes + static_cast<long long>(blockIdx.x) * seat_vectors;
  uint4* to = seats + static_cast<long long>(slots[blockIdx.x]) * seat_vectors;
  const uint4 header = from[0];
  copy_vectors(from, to, header.y != 0 ? bias : 1);
  copy_vectors(from + bias, to + bias, (header.x + 1) / 2);
}
