/* Carries out calls of the compiled pass that come in at stdin, each with the memory that it refers to: see arm64.py. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
int truedraft_pass(), truedraft_linear(), truedraft_panels(), truedraft_rows(), truedraft_choose(), truedraft_takes_blocks();
int truedraft_pack_blocks(), truedraft_attends_alone();
int64_t truedraft_multiply(), truedraft_layout();

int main(void) {
  const Function functions[] = {(Function)truedraft_pass,     (Function)truedraft_linear, (Function)truedraft_panels,
                                (Function)truedraft_multiply, (Function)truedraft_choose, (Function)truedraft_layout,
                                (Function)truedraft_takes_blocks, (Function)truedraft_rows,
                                (Function)truedraft_pack_blocks, (Function)truedraft_attends_alone};
  for (int64_t head[3]; fread(head, sizeof head, 1, stdin) == 1;) {
    const size_t bytes = (size_t)head[1], pointers = (size_t)head[2];
    int64_t *at = malloc(sizeof(int64_t) * (pointers + 1));
    char *image = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!at || !image || fread(at, sizeof(int64_t), pointers, stdin) != pointers || fread(image, 1, bytes, stdin) != bytes)
      return 1;
    for (size_t i = 0; i < pointers; i++) *(int64_t *)(image + at[i]) += (int64_t)image;
    const int64_t *a = (int64_t *)image;
    const int64_t result = functions[head[0]](a[0], a[1], a[2], a[3], a[4], a[5]);
    for (size_t i = 0; i < pointers; i++) *(int64_t *)(image + at[i]) -= (int64_t)image;
    fwrite(&result, sizeof result, 1, stdout);
    fwrite(image, 1, bytes, stdout);
    fflush(stdout);
    free(at);
    free(image);
  }
  return 0;
}
