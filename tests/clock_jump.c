// The time of day of a process, moved by the seconds in the file that CLOCK_JUMP names: preloaded by
// tests, so that the clock of nobody else jumps.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const volatile int64_t* jump_s;

__attribute__((constructor)) static void map_jump(void) {
  int file = open(getenv("CLOCK_JUMP"), O_RDONLY);
  void* mapped = mmap(NULL, sizeof(*jump_s), PROT_READ, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) jump_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (real == NULL) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, now);
  if (jump_s != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += *jump_s;
  return failed;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  struct timespec time;
  int failed = clock_gettime(CLOCK_REALTIME, &time);
  now->tv_sec = time.tv_sec;
  now->tv_usec = time.tv_nsec / 1000;
  return failed;
}

time_t time(time_t* target) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (target != NULL) *target = now.tv_sec;
  return now.tv_sec;
}
