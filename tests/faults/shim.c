/* Makes chosen file operations below one directory fail, or kills the process at them; also shifts the clock.
 *
 * Preloaded into a process (LD_PRELOAD), it counts the calls that change files whose path begins with the directory
 * given to fault_arm. A file descriptor's path is what /proc/self/fd says. Nothing happens before fault_arm.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PERSISTENT = 1, SHORT = 2, KILL_BEFORE = 4, KILL_AFTER = 8, READS = 16 };
enum kind { CHANGES, GROWS, WRITES, READING }; /* GROWS and WRITES need space on the disk */
enum verdict { PASS, FAIL, HALF, DIE_AFTER };

static char root[PATH_MAX], only_name[64], only_part[256];
static size_t root_length;
static atomic_long counted, target;
static atomic_int flags, failing, error_code, halved;
static int log_file = -1;
static atomic_long clock_offset;

void fault_arm(const char *directory, long at, int error, int chosen) {
    root_length = 0;
    counted = 0;
    target = at;
    error_code = error;
    flags = chosen;
    failing = halved = 0;
    strncpy(root, directory, sizeof root - 1);
    root_length = strlen(root);
}

void fault_disarm(void) { root_length = 0; }

/* Count only calls of this name whose path holds this part; empty for any. */
void fault_only(const char *name, const char *part) {
    snprintf(only_name, sizeof only_name, "%s", name);
    snprintf(only_part, sizeof only_part, "%s", part);
}

long fault_count(void) { return counted; }

long fault_reached(void) { return target > 0 && counted >= target; }

void fault_log(const char *file) {
    if (log_file >= 0) syscall(SYS_close, log_file);
    log_file = file ? (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
}

void fault_shift_clock(long seconds) { clock_offset = seconds; }

static void die(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

static int below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int resolve(int at, const char *path, char *whole) {
    char link[64];
    if (path && path[0] == '/') return snprintf(whole, PATH_MAX, "%s", path) < PATH_MAX;
    if (at == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t length = readlink(link, whole, PATH_MAX - 1);
    if (length < 0) return 0;
    whole[length] = 0;
    if (path) snprintf(whole + length, PATH_MAX - (size_t)length, "/%s", path);
    return 1;
}

/* What is to become of one call. The path is path relative to the descriptor at, or at itself where path is NULL. */
static enum verdict judge(const char *name, enum kind kind, int at, const char *path) {
    char whole[PATH_MAX];
    if (!root_length || (kind == READING) != !!(flags & READS)) return PASS;
    int kept = errno;
    int inside = resolve(at, path, whole) && below(whole) && (!only_name[0] || !strcmp(only_name, name)) &&
                 strstr(whole, only_part);
    errno = kept;
    if (!inside) return PASS;
    long now = atomic_fetch_add(&counted, 1) + 1;
    if (log_file >= 0) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%ld %s %s\n", now, name, whole);
        syscall(SYS_write, log_file, line, length);
    }
    if (!target) return PASS;
    if (now == target) {
        if ((flags & SHORT) && !halved && kind == WRITES) {
            halved = 1;
            if (!(flags & (KILL_BEFORE | KILL_AFTER))) target = now + 1; /* the error comes with what follows */
            return HALF;
        }
        if (flags & KILL_BEFORE) die();
        if (flags & KILL_AFTER) return DIE_AFTER;
        failing = !!(flags & PERSISTENT);
    } else if (!failing || now < target) {
        return PASS;
    } else if ((error_code == ENOSPC || error_code == EDQUOT) && kind == CHANGES) {
        return PASS; /* files can be removed from a full disk */
    }
    errno = error_code;
    return FAIL;
}

#define REAL(type, name, ...)                          \
    static type (*real)(__VA_ARGS__);                  \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)

#define SIMPLE(name, kind, at, path, parameters, arguments, ...) \
    int name parameters {                                        \
        REAL(int, #name, __VA_ARGS__);                           \
        enum verdict verdict = judge(#name, kind, at, path);     \
        if (verdict == FAIL) return -1;                          \
        int result = real arguments;                             \
        if (verdict == DIE_AFTER) die();                         \
        return result;                                           \
    }

SIMPLE(rename, CHANGES, AT_FDCWD, to, (const char *from, const char *to), (from, to), const char *, const char *)
SIMPLE(renameat, CHANGES, b, to, (int a, const char *from, int b, const char *to), (a, from, b, to), int, const char *,
       int, const char *)
SIMPLE(renameat2, CHANGES, b, to, (int a, const char *from, int b, const char *to, unsigned how),
       (a, from, b, to, how), int, const char *, int, const char *, unsigned)
SIMPLE(link, GROWS, AT_FDCWD, to, (const char *from, const char *to), (from, to), const char *, const char *)
SIMPLE(linkat, GROWS, b, to, (int a, const char *from, int b, const char *to, int how), (a, from, b, to, how), int,
       const char *, int, const char *, int)
SIMPLE(symlink, GROWS, AT_FDCWD, to, (const char *from, const char *to), (from, to), const char *, const char *)
SIMPLE(unlink, CHANGES, AT_FDCWD, path, (const char *path), (path), const char *)
SIMPLE(unlinkat, CHANGES, at, path, (int at, const char *path, int how), (at, path, how), int, const char *, int)
SIMPLE(remove, CHANGES, AT_FDCWD, path, (const char *path), (path), const char *)
SIMPLE(rmdir, CHANGES, AT_FDCWD, path, (const char *path), (path), const char *)
SIMPLE(mkdir, GROWS, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
SIMPLE(mkdirat, GROWS, at, path, (int at, const char *path, mode_t mode), (at, path, mode), int, const char *, mode_t)
SIMPLE(fsync, GROWS, fd, NULL, (int fd), (fd), int)
SIMPLE(fdatasync, GROWS, fd, NULL, (int fd), (fd), int)
SIMPLE(truncate, CHANGES, AT_FDCWD, path, (const char *path, off_t length), (path, length), const char *, off_t)
SIMPLE(truncate64, CHANGES, AT_FDCWD, path, (const char *path, off64_t length), (path, length), const char *, off64_t)
SIMPLE(ftruncate, CHANGES, fd, NULL, (int fd, off_t length), (fd, length), int, off_t)
SIMPLE(ftruncate64, CHANGES, fd, NULL, (int fd, off64_t length), (fd, length), int, off64_t)
SIMPLE(fallocate, GROWS, fd, NULL, (int fd, int how, off_t begin, off_t length), (fd, how, begin, length), int, int,
       off_t, off_t)

int posix_fallocate(int fd, off_t begin, off_t length) {
    REAL(int, "posix_fallocate", int, off_t, off_t);
    enum verdict verdict = judge("posix_fallocate", GROWS, fd, NULL);
    if (verdict == FAIL) return errno;
    int result = real(fd, begin, length);
    if (verdict == DIE_AFTER) die();
    return result;
}

/* ---- opening: for writing alone; a full disk still opens files that exist */

#define FOR_WRITING(how) (((how) & O_ACCMODE) != O_RDONLY || ((how) & (O_CREAT | O_TRUNC)))

static mode_t mode_of(int how, va_list rest) {
    return (how & O_CREAT) || (how & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

static enum verdict judge_open(const char *name, int at, const char *path, int how) {
    return FOR_WRITING(how) ? judge(name, how & O_CREAT ? GROWS : CHANGES, at, path) : PASS;
}

#define OPEN(name)                                                     \
    int name(const char *path, int how, ...) {                         \
        REAL(int, #name, const char *, int, mode_t);                   \
        va_list rest;                                                  \
        va_start(rest, how);                                           \
        mode_t mode = mode_of(how, rest);                              \
        va_end(rest);                                                  \
        enum verdict verdict = judge_open(#name, AT_FDCWD, path, how); \
        if (verdict == FAIL) return -1;                                \
        int result = real(path, how, mode);                            \
        if (verdict == DIE_AFTER) die();                               \
        return result;                                                 \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                             \
    int name(int at, const char *path, int how, ...) {           \
        REAL(int, #name, int, const char *, int, mode_t);        \
        va_list rest;                                            \
        va_start(rest, how);                                     \
        mode_t mode = mode_of(how, rest);                        \
        va_end(rest);                                            \
        enum verdict verdict = judge_open(#name, at, path, how); \
        if (verdict == FAIL) return -1;                          \
        int result = real(at, path, how, mode);                  \
        if (verdict == DIE_AFTER) die();                         \
        return result;                                           \
    }
OPENAT(openat)
OPENAT(openat64)

SIMPLE(creat, GROWS, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
SIMPLE(creat64, GROWS, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode), const char *, mode_t)

/* glibc's own fopen opens by an internal call, so that it has to be counted here */
#define FOPEN(name)                                                                                              \
    FILE *name(const char *path, const char *mode) {                                                             \
        REAL(FILE *, #name, const char *, const char *);                                                         \
        enum verdict verdict = strpbrk(mode, "wa+") ? judge(#name, GROWS, AT_FDCWD, path) : PASS;                \
        if (verdict == FAIL) return NULL;                                                                        \
        FILE *result = real(path, mode);                                                                         \
        if (verdict == DIE_AFTER) die();                                                                         \
        return result;                                                                                           \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* ---- writing and reading */

#define AFTER_HALF(half)                                                   \
    do {                                                                   \
        ssize_t written = (half);                                          \
        if (flags & (KILL_BEFORE | KILL_AFTER)) die();                     \
        return written;                                                    \
    } while (0)

#define TRANSFER(name, kind, shorter, parameters, arguments, ...)  \
    ssize_t name parameters {                                      \
        REAL(ssize_t, #name, __VA_ARGS__);                         \
        enum verdict verdict = judge(#name, kind, fd, NULL);       \
        if (verdict == FAIL) return -1;                            \
        if (verdict == HALF) AFTER_HALF(shorter);                  \
        ssize_t result = real arguments;                           \
        if (verdict == DIE_AFTER) die();                           \
        return result;                                             \
    }

static ssize_t first_half(int fd, const struct iovec *parts, off_t offset, int positioned) {
    size_t half = (parts[0].iov_len + 1) / 2;
    return positioned ? syscall(SYS_pwrite64, fd, parts[0].iov_base, half, offset)
                      : syscall(SYS_write, fd, parts[0].iov_base, half);
}

TRANSFER(write, WRITES, real(fd, from, (num + 1) / 2), (int fd, const void *from, size_t num), (fd, from, num), int,
         const void *, size_t)
TRANSFER(pwrite, WRITES, real(fd, from, (num + 1) / 2, offset), (int fd, const void *from, size_t num, off_t offset),
         (fd, from, num, offset), int, const void *, size_t, off_t)
TRANSFER(pwrite64, WRITES, real(fd, from, (num + 1) / 2, offset),
         (int fd, const void *from, size_t num, off64_t offset), (fd, from, num, offset), int, const void *, size_t,
         off64_t)
TRANSFER(writev, WRITES, first_half(fd, parts, 0, 0), (int fd, const struct iovec *parts, int num), (fd, parts, num),
         int, const struct iovec *, int)
TRANSFER(pwritev, WRITES, first_half(fd, parts, offset, 1),
         (int fd, const struct iovec *parts, int num, off_t offset), (fd, parts, num, offset), int,
         const struct iovec *, int, off_t)
TRANSFER(pwritev64, WRITES, first_half(fd, parts, offset, 1),
         (int fd, const struct iovec *parts, int num, off64_t offset), (fd, parts, num, offset), int,
         const struct iovec *, int, off64_t)
TRANSFER(read, READING, real(fd, into, num), (int fd, void *into, size_t num), (fd, into, num), int, void *, size_t)
TRANSFER(pread, READING, real(fd, into, num, offset), (int fd, void *into, size_t num, off_t offset),
         (fd, into, num, offset), int, void *, size_t, off_t)
TRANSFER(pread64, READING, real(fd, into, num, offset), (int fd, void *into, size_t num, off64_t offset),
         (fd, into, num, offset), int, void *, size_t, off64_t)
TRANSFER(readv, READING, real(fd, parts, num), (int fd, const struct iovec *parts, int num), (fd, parts, num), int,
         const struct iovec *, int)
TRANSFER(preadv, READING, real(fd, parts, num, offset), (int fd, const struct iovec *parts, int num, off_t offset),
         (fd, parts, num, offset), int, const struct iovec *, int, off_t)

/* ---- the clock on the wall */

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += clock_offset;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    REAL(int, "gettimeofday", struct timeval *, void *);
    int result = real(now, zone);
    if (!result) now->tv_sec += clock_offset;
    return result;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
