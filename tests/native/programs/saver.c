/* An allocator whose GPU memory comes and goes under addresses that stay; named as one that kvprobe knows, or not. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>

int cuMemCreate(uint64_t *, size_t, const void *, uint64_t), cuMemMap(uint64_t, size_t, size_t, uint64_t, uint64_t);
int cuMemUnmap(uint64_t, size_t), cuMemRelease(uint64_t), cuMemSetAccess(uint64_t, size_t, const void *, size_t);
int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, uint64_t), cuMemAddressFree(uint64_t, size_t);

static __thread int backs_up;

_Bool tms_get_enable_cpu_backup(void);
_Bool tms_get_enable_cpu_backup(void) { return backs_up; }
const char *tms_get_cpu_backup_backend(void);
const char *tms_get_cpu_backup_backend(void) { return backs_up == 2 ? "mmap" : "pinned"; }

void saver_backs_up(int is);
void saver_backs_up(int is) { backs_up = is; }

int saver_map(uint64_t at, size_t bytes, uint64_t *handle);
int saver_map(uint64_t at, size_t bytes, uint64_t *handle) {
    static const uint64_t any[4];
    int error = cuMemCreate(handle, bytes, any, 0);
    if (!error) error = cuMemMap(at, bytes, 0, *handle, 0);
    return error ? error : cuMemSetAccess(at, bytes, any, 1);
}

int saver_unmap(uint64_t at, size_t bytes, uint64_t handle);
int saver_unmap(uint64_t at, size_t bytes, uint64_t handle) {
    int error = cuMemUnmap(at, bytes);
    return error ? error : cuMemRelease(handle);
}

int saver_new(uint64_t *at, size_t bytes, uint64_t *handle);
int saver_new(uint64_t *at, size_t bytes, uint64_t *handle) {
    int error = cuMemAddressReserve(at, bytes, 0, 0, 0);
    return error ? error : saver_map(*at, bytes, handle);
}

int saver_free(uint64_t at, size_t bytes, uint64_t handle);
int saver_free(uint64_t at, size_t bytes, uint64_t handle) {
    int error = handle ? saver_unmap(at, bytes, handle) : 0;
    return error ? error : cuMemAddressFree(at, bytes);
}
