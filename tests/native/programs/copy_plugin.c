#include <stddef.h>
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int copy_by_plugin(void *d, const void *s, size_t n, int k, void *t);
int copy_by_plugin(void *d, const void *s, size_t n, int k, void *t) { int r = cudaMemcpyAsync(d, s, n, k, t); __asm__ volatile(""); return r; }
