/* Copies one block again and again: "same", "rewritten" before each copy, or "failing"; "batch": in parts, by one call,
 * "rewritten-batch": whose last part is another each time; "rows": a 2D copy of columns, beside which
 * other bytes are written each time, "rewritten-rows": whose last rows are others each time, "apart": of one whose rows
 * lie apart on the device as well. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaMalloc(void **, size_t);
extern int cudaHostAlloc(void **, size_t, unsigned), cudaStreamSynchronize(void *), cudaStreamCreate(void **);
extern int cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, void *);
extern int cudaMemcpyBatchAsync(void **, void **, size_t *, size_t, void *, size_t *, size_t, void *);

enum { SIZE = 1 << 20, TIMES = 200, PARTS = 40, ROW = 8 << 10 };

/* Orders, locations and flags of every copy: to the device. */
static int to_device[6] = {1, 2, 0, 1, 0, 0};

static int in_parts(uint8_t *device, uint8_t *host, void *stream) {
    void *dsts[PARTS], *srcs[PARTS];
    size_t sizes[PARTS], first = 0;
    for (size_t i = 0; i < PARTS; i++) {
        size_t at = (i * 7 % PARTS) * (SIZE / PARTS);
        dsts[i] = device + at, srcs[i] = host + at, sizes[i] = SIZE / PARTS;
    }
    return cudaMemcpyBatchAsync(dsts, srcs, sizes, PARTS, to_device, &first, 1, stream);
}

static int in_rows(uint8_t *device, uint8_t *host, int apart) {
    return cudaMemcpy2DAsync(device, apart ? ROW : ROW / 4, host + ROW / 2, ROW, ROW / 4, SIZE / ROW, 1, NULL);
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "same";
    void *device, *host, *stream = NULL; /* no batch goes to the default stream */
    if (strstr(how, "batch") && cudaStreamCreate(&stream)) return 1;
    if (cudaMalloc(&device, SIZE) || cudaHostAlloc(&host, SIZE, 0)) return 1;
    for (size_t i = 0; i < SIZE; i++) ((uint8_t *)host)[i] = (uint8_t)(i * 31 >> 3);
    int failed = 0;
    for (int i = 0; i < TIMES; i++) {
        if (!strcmp(how, "rewritten")) *(uint32_t *)host = (uint32_t)i;
        if (!strcmp(how, "rows"))
            for (int row = 0; row < SIZE / ROW; row++) {
                memset((uint8_t *)host + row * ROW, i, ROW / 2);
                memset((uint8_t *)host + row * ROW + ROW * 3 / 4, i, ROW / 4);
            }
        if (!strcmp(how, "rewritten-batch") || !strcmp(how, "rewritten-rows"))
            memset((uint8_t *)host + SIZE / 2, i, SIZE / 2);
        if (strstr(how, "batch"))
            failed += in_parts(device, host, stream) != 0;
        else if (strstr(how, "rows") || !strcmp(how, "apart"))
            failed += in_rows(device, host, !strcmp(how, "apart")) != 0;
        else
            failed += cudaMemcpyAsync(device, host, SIZE, strcmp(how, "failing") ? 1 : 9, NULL) != 0;
        cudaStreamSynchronize(stream);
    }
    uint64_t sum = 0;
    for (size_t i = 0; i < SIZE / 8; i++) sum = sum * 31 + ((uint64_t *)host)[i];
    printf("%d %llx\n", failed, (unsigned long long)sum);
    return 0;
}
