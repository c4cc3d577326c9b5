/* Entries of cached keys and values. */

#include <stdint.h>
#include <string.h>

/* Moves the entries of a slot at `count` ascending positions to those from `first` on, none of them to behind itself.
   kept: of each of `tensors` tensors (slots, heads, positions, size) five numbers: its address, the bytes from a slot to
   the next and from a head to the next, its heads, and the bytes of an entry; the entries of a head are adjacent. */
void truedraft_move(const int64_t *kept, int64_t tensors, int64_t slot, int64_t first, const int64_t *place, int64_t count) {
    for (const int64_t *end = kept + 5 * tensors; kept < end; kept += 5) {
        char *head = (char *)(uintptr_t)kept[0] + slot * kept[1];
        for (int64_t h = 0; h < kept[3]; h++, head += kept[2])
            for (int64_t i = 0; i < count; i++) memmove(head + (first + i) * kept[4], head + place[i] * kept[4], (size_t)kept[4]);
    }
}
