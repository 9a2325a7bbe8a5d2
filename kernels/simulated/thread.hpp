// The machine's interface for instructions: the running thread, synchronisation of a warp and of a
// block, memory. At every wait another warp may run.
#pragma once

#include "kernels/simulated/machine.hpp"

namespace longspan::simulated {

// ---- the running thread ------------------------------------------------------------------------

int lane();
/// Bytes of dynamic shared memory of its block.
int dynamic_shared_bytes();

/// Another warp or lane may run here: before anything that others can see. Schedules decide.
void may_yield(Site site);
/// This thread waits for another in a loop: another one runs.
void spin(Site site);

// ---- shared memory -----------------------------------------------------------------------------

/// Addresses in the shared window, in which no object is at 0.
std::uint32_t shared_address(const void* pointer, Site site);
/// `bytes` at that address, which must belong to this block, at a multiple of `align`.
std::byte* find_shared(std::uint32_t address, int bytes, int align, const char* what, Site site);
/// The same for a read or write now: no copy into them is in flight.
std::byte* shared_pointer(std::uint32_t address, int bytes, int align, const char* what, Site site);
/// The beginning of the block's dynamic shared memory.
std::byte* dynamic_shared();
/// A store that no race detector checks. `has_proxies`: the thread has to fence it before copies of
/// TMA and products of its own warp read it.
void store_quietly(void* to, const void* from, std::size_t bytes, bool has_proxies = false);
/// The block's own variable of this name, which lives as long as the block. `key`: one for each
/// variable.
void* static_shared(const void* key, std::size_t bytes, std::size_t align);

// ---- synchronisation ---------------------------------------------------------------------------

/// All lanes of `mask` that have not ended call this with the same `what`; the last one runs
/// `complete` over their inputs (lanes[l]; null if l is not in the mask). orders_memory: earlier
/// writes of each are visible to all after it.
using Complete = void (*)(void* const (&lanes)[32], unsigned mask);
void meet(unsigned mask, const char* what, void* data, Complete complete, bool orders_memory,
          Site site);
/// The same for instructions that all 32 lanes take together.
void meet_all(const char* what, void* data, Complete complete, Site site);

/// Barrier `id` of the block, for `threads` threads (0: all that have not ended). `waits` false:
/// only arrives. Returns whether any thread of a barrier for all passed a true `predicate`.
bool block_barrier(int id, int threads, bool waits, bool predicate, const char* what, Site site);

// ---- mbarriers, in eight bytes of shared memory ------------------------------------------------

void barrier_init(void* word, int arrivals, Site site);
/// Arrives and announces `bytes`.
void barrier_arrive(void* word, int bytes, Site site);
void barrier_wait(void* word, std::uint32_t parity, Site site);
/// cp.async.mbarrier.arrive: one more arrival, which occurs when this thread's copies have landed.
void barrier_expect_copies(void* word, Site site);

// ---- asynchronous operations -------------------------------------------------------------------

/// cp.async of this thread: `size` bytes, of which the first `bytes` are read and the rest are 0.
void copy_async(std::uint32_t to, const void* from, int size, int bytes, Site site);
void commit_copies();
void wait_copies(int pending, Site site);

/// A copy of TMA into this block's shared memory: `land` writes it, and then `bytes` are counted on
/// `barrier`. Until then the bytes at `to` are poison. `land` reports its reads and writes to the
/// race detector (engine_reads, engine_writes).
void copy_by_engine(std::uint32_t to, int bytes, void* barrier, std::function<void()> land,
                    Site site);
void engine_reads(const void* from, std::size_t bytes);
void engine_writes(void* to, std::size_t bytes);

/// A product of this warp's on the tensor cores (wgmma), run at its group's commit or later, at the
/// latest when the warp waits for the group. All lanes call it together. The accumulators of the
/// lanes are poison meanwhile, so `run` gets them together with each lane's input.
using Product = std::function<void(void* const (&lanes)[32], float* const (&sums)[32])>;
void begin_products(Site site);
void queue_product(void* data, std::size_t bytes, float* accumulators, int count, Product run,
                   Site site);
void commit_products(Site site);
void wait_products(int pending, Site site);
/// An operand of a product in shared memory.
void product_reads(const void* from, std::size_t bytes);

/// Fences between ordinary accesses and those of TMA and of products: of shared memory,
/// of global memory.
void fence_shared_proxy(Site site);
void fence_global_proxy(Site site);

// ---- kernels that overlap ----------------------------------------------------------------------

void let_next_kernel_start();
void wait_for_kernels_before(Site site);

// ---- memory shared with other GPUs -------------------------------------------------------------

/// 4 or 8 aligned bytes as a unit: to memory, where they arrive at some later time, those of one
/// address in order; from memory, or the last value that this thread itself has sent there.
void send_word(void* to, std::uint64_t value, int bytes, Site site);
std::uint64_t fetch_word(const void* from, int bytes, Site site);
/// The same; earlier writes of its writer are visible after it. The writer is a stream, or
/// count_word: words that kernels send order nothing.
std::uint64_t acquire_word(const void* from, int bytes, Site site);
/// Adds `more` to a word once everything that this grid has sent before has arrived.
void count_word(std::uint64_t* word, std::uint64_t more, Site site);
/// Words that this thread has sent arrive before those that it sends from here on.
void fence_words(Site site);

}  // namespace longspan::simulated
