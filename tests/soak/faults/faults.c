/* Faults of the operating system, for processes that preload this library: another time of day, and a full disk.

   The file that SOAK_FAULTS names holds two 64-bit numbers, which may change at any time: the seconds by which the time of
   day is off, and the device that is full (0: none). The monotonic clock stays as it is, as it does when an administrator
   sets the time. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static volatile int64_t none[2];
static volatile int64_t *faults = none;

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("SOAK_FAULTS");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) faults = found;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = REAL(clock_gettime);
  int code = real(clock, now);
  if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += faults[0];
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (out) *out = found.tv_sec;
  return found.tv_sec;
}

/* Points of the time of day until which a thread waits; those of the monotonic clock are too small for one. The kernel
   knows nothing of the fault. */
static const struct timespec *seen_by_kernel(const struct timespec *until, struct timespec *moved) {
  if (!until || until->tv_sec < 1000000000) return until;
  *moved = *until;
  moved->tv_sec -= faults[0];
  return moved;
}

int sem_timedwait(sem_t *restrict one, const struct timespec *restrict until) {
  struct timespec moved;
  return REAL(sem_timedwait)(one, seen_by_kernel(until, &moved));
}

int pthread_cond_timedwait(pthread_cond_t *restrict one, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict until) {
  struct timespec moved;
  return REAL(pthread_cond_timedwait)(one, lock, seen_by_kernel(until, &moved));
}

long syscall(long number, ...) {
  __builtin_va_list words;
  long word[6];
  struct timespec moved;
  __builtin_va_start(words, number);
  for (int i = 0; i < 6; i++) word[i] = __builtin_va_arg(words, long);
  __builtin_va_end(words);
  if (number == SYS_futex && (word[1] & FUTEX_CLOCK_REALTIME))
    word[3] = (long)seen_by_kernel((const struct timespec *)word[3], &moved);
  return REAL(syscall)(number, word[0], word[1], word[2], word[3], word[4], word[5]);
}

static int full(int file) {
  struct stat found;
  if (!faults[1] || fstat(file, &found) || !S_ISREG(found.st_mode) || (int64_t)found.st_dev != faults[1]) return 0;
  errno = ENOSPC;
  return 1;
}

ssize_t write(int file, const void *data, size_t size) {
  return full(file) ? -1 : REAL(write)(file, data, size);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t place) {
  return full(file) ? -1 : REAL(pwrite)(file, data, size, place);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t place) {
  return full(file) ? -1 : REAL(pwrite64)(file, data, size, place);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
  return full(file) ? -1 : REAL(writev)(file, parts, count);
}
