/* A library that takes reads of 100,000 bytes, as one of a storage system does, and fills the memory itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/uio.h>

ssize_t preadv64v2(int fd, const struct iovec *v, int count, off64_t offset, int flags) {
    if (count != 1 || v->iov_len != 100000)
        return ((ssize_t(*)(int, const struct iovec *, int, off64_t, int))(size_t)dlsym(RTLD_NEXT, "preadv64v2"))(
            fd, v, count, offset, flags);
    memset(v->iov_base, 'S', v->iov_len);
    return (ssize_t)v->iov_len;
}
