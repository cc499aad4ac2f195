/* Copies one block again and again: "same", "rewritten" before each copy, or "failing". */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaMalloc(void **, size_t);
extern int cudaHostAlloc(void **, size_t, unsigned), cudaStreamSynchronize(void *);

enum { SIZE = 1 << 20, TIMES = 200 };

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "same";
    void *device, *host;
    if (cudaMalloc(&device, SIZE) || cudaHostAlloc(&host, SIZE, 0)) return 1;
    for (size_t i = 0; i < SIZE; i++) ((uint8_t *)host)[i] = (uint8_t)(i * 31 >> 3);
    int failed = 0;
    for (int i = 0; i < TIMES; i++) {
        if (!strcmp(how, "rewritten")) *(uint32_t *)host = (uint32_t)i;
        failed += cudaMemcpyAsync(device, host, SIZE, strcmp(how, "failing") ? 1 : 9, NULL) != 0;
        cudaStreamSynchronize(NULL);
    }
    uint64_t sum = 0;
    for (size_t i = 0; i < SIZE / 8; i++) sum = sum * 31 + ((uint64_t *)host)[i];
    printf("%d %llx\n", failed, (unsigned long long)sum);
    return 0;
}
