/* The inner loops of kernel.py in C. Optional: without this library numpy does the same.
 *
 * Owns: three loops over one piece of a tensor. Each reads its inputs once.
 *
 * Promises: nothing outside the stated lengths is read or written. No allocation, no global state, no input is
 * trusted: any bytes are valid input, and the caller (kernel.py) checks the lengths of the buffers.
 *
 * Does not do: zstd, checksums of whole pieces, files, threads. Built by hatch_build.py, loaded by ctypes, which lets
 * other Python threads run meanwhile.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define WORD 8
#define LINE 64
#define BLOCK 4096 /* fits the first-level cache together with its base */
#define EVEN_BYTES 0x00ff00ff00ff00ffull
#define LOW_BITS 0x0101010101010101ull
#define LOW_SEVEN 0x7f7f7f7f7f7f7f7full
/* Byte counters of one byte each must be emptied before they overflow. */
#define MOST_ROUNDS 255

/* Must equal ABI in kernel.py: a library of another version is not used. */
EXPORT uint32_t hotloop_kernel_abi(void) { return 1; }

static uint64_t load(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, WORD);
    return word;
}

static void store(uint8_t *at, uint64_t word) { memcpy(at, &word, WORD); }

/* Return 1 in each byte that is not zero. */
static uint64_t mark(uint64_t word) { return ((((word & LOW_SEVEN) + LOW_SEVEN) | word) >> 7) & LOW_BITS; }

static uint64_t sum_bytes(uint64_t counts) {
    uint64_t total = 0;
    for (int shift = 0; shift < 64; shift += 8) total += counts >> shift & 0xff;
    return total;
}

/* Write a XOR b, which may be over b, and return how many bytes of b (or else of the result) were not zero. */
static inline uint64_t xor_and_count(const uint8_t *a, const uint8_t *b, uint8_t *out, size_t n, int counts_b) {
    uint64_t total = 0;
    size_t at = 0;
    while (n - at >= WORD) {
        size_t rounds = (n - at) / WORD;
        if (rounds > MOST_ROUNDS) rounds = MOST_ROUNDS;
        uint64_t counts = 0;
        for (size_t round = 0; round < rounds; round++) {
            uint64_t right = load(b + at + WORD * round);
            uint64_t result = load(a + at + WORD * round) ^ right;
            counts += mark(counts_b ? right : result);
            store(out + at + WORD * round, result);
        }
        total += sum_bytes(counts);
        at += WORD * rounds;
    }
    for (; at < n; at++) {
        uint8_t right = b[at], result = a[at] ^ right;
        total += (counts_b ? right : result) != 0;
        out[at] = result;
    }
    return total;
}

/* difference = old XOR new, all of n bytes; return how many of its bytes are not zero. */
EXPORT uint64_t hotloop_compare(const uint8_t *old, const uint8_t *new_bytes, uint8_t *difference, size_t n) {
    return xor_and_count(old, new_bytes, difference, n, 0);
}

/* difference = base XOR difference, in place, n bytes; return how many bytes of the old difference were not zero. */
EXPORT uint64_t hotloop_patch(const uint8_t *base, uint8_t *difference, size_t n) {
    return xor_and_count(base, difference, difference, n, 1);
}

/* The sum of a word's bytes. */
static uint64_t sum_word(uint64_t word) {
    return ((word & EVEN_BYTES) + (word >> 8 & EVEN_BYTES)) * 0x0001000100010001ull >> 48;
}

/* The sum of a word's bytes, each times its place, 0 to 7. A product's top 16 bits add up the lanes, whose partial sums
 * stay below 2**16. */
static uint64_t sum_places(uint64_t word) {
    return ((word & EVEN_BYTES) * 0x0000000200040006ull >> 48) + ((word >> 8 & EVEN_BYTES) * 0x0001000300050007ull >> 48);
}

/* Write which words of a block are not zero, as byte offsets, and return how many. No branch depends on the data:
 * where about a third of the lines hold a change, as in a step of bf16 weights, the processor cannot predict any. */
static size_t find_words(const uint8_t *block, uint16_t *found) {
    uint16_t lines[BLOCK / LINE];
    size_t num_lines = 0, count = 0;
    for (size_t at = 0; at < BLOCK; at += LINE) {
        uint64_t any = 0;
        for (size_t word = 0; word < LINE; word += WORD) any |= load(block + at + word);
        lines[num_lines] = (uint16_t)at;
        num_lines += any != 0;
    }
    for (size_t line = 0; line < num_lines; line++)
        for (size_t at = lines[line], word = 0; word < LINE; word += WORD) {
            found[count] = (uint16_t)(at + word);
            count += load(block + at + word) != 0;
        }
    return count;
}

/* Gather the words of one piece that change.
 *
 * base, difference: n bytes each. position: where the piece begins in its tensor. ranges: room for n / 24 + 1 pairs.
 * data: room for n bytes. facts: receives three numbers: how many bytes of `data` were written, and what the changes
 * add to the low and the high sum of the piece's Adler-32.
 *
 * Returns how many ranges were written. Where more than a third of the words change it is one, from the first to the
 * last of them, since a range costs as much as two words.
 */
EXPORT int64_t hotloop_merge(const uint8_t *base, const uint8_t *difference, size_t n, int64_t position,
                             int64_t *ranges, uint8_t *data, int64_t *facts) {
    const size_t most = (n + WORD - 1) / WORD / 3; /* so that 8 * most <= n */
    size_t count = 0, first = 0, end = 0;
    int64_t low = 0, high = 0;
    uint8_t last_base[BLOCK], last_difference[BLOCK];
    uint16_t found[BLOCK / WORD + 1]; /* one more, written to by the last word when it is zero */
    for (size_t at = 0; at < n; at += BLOCK) {
        const uint8_t *old = base + at, *block = difference + at;
        if (n - at < BLOCK) { /* the last block, made whole with zeros */
            memset(last_base, 0, BLOCK);
            memset(last_difference, 0, BLOCK);
            memcpy(last_base, old, n - at);
            memcpy(last_difference, block, n - at);
            old = last_base;
            block = last_difference;
        }
        size_t num_found = find_words(block, found);
        if (!num_found) continue;
        if (!count) first = at + found[0];
        end = at + found[num_found - 1] + WORD;
        int is_gathered = count + num_found <= most;
        for (size_t each = 0; each < num_found; each++) {
            size_t within = found[each];
            uint64_t before = load(old + within), after = before ^ load(block + within);
            int64_t moved = (int64_t)sum_word(after) - (int64_t)sum_word(before);
            low += moved;
            high += moved * (int64_t)(n - at - within) - ((int64_t)sum_places(after) - (int64_t)sum_places(before));
            if (is_gathered) {
                ranges[2 * (count + each)] = position + (int64_t)(at + within);
                ranges[2 * (count + each) + 1] = position + (int64_t)(at + within) + WORD;
                store(data + WORD * (count + each), after);
            }
        }
        count += num_found;
    }
    if (end > n) end = n; /* the last word may be cut */
    size_t filled = WORD * count;
    if (count > most) {
        ranges[0] = position + (int64_t)first;
        filled = end - first;
        for (size_t at = 0; at < filled; at++) data[at] = base[first + at] ^ difference[first + at];
        count = 1;
    } else if (count) {
        filled -= (size_t)(ranges[2 * count - 1] - position) - end;
    }
    if (count) ranges[2 * count - 1] = position + (int64_t)end;
    facts[0] = (int64_t)filled;
    facts[1] = low;
    facts[2] = high;
    return (int64_t)count;
}
