/* A program that is linked to one runtime, and by a library to another of the same names. */
#include <stdio.h>

int cudaMemcpyAsync(void *, const void *, unsigned long, int, void *);
int copy_once(void);
#ifdef ELSEWHERE
void *address_elsewhere(void) { return (void *)cudaMemcpyAsync; }
#else
int main(void) {
    for (int i = 0; i < 2; i++) printf("%d %d\n", cudaMemcpyAsync(0, 0, 24, 1, (void *)8), copy_once());
    return 0;
}
#endif
