/* A stand-in for a CUDA runtime: says which one it is. */
#ifndef WHICH
#define WHICH 0
#endif
int cudaMemcpyAsync(void *dst, const void *src, unsigned long bytes, int kind, void *stream) {
    (void)dst, (void)src, (void)bytes, (void)kind, (void)stream;
    return WHICH;
}
int cudaRuntimeGetVersion(int *version) { return *version = WHICH * 1000, 0; }
