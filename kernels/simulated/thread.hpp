// What the instructions see of the machine: the thread that runs, meetings of a warp and of a
// block, memory. Every wait is a place where another warp may go on.
#pragma once

#include "kernels/simulated/machine.hpp"

namespace longspan::simulated {

// ---- the thread that runs ----------------------------------------------------------------------

int lane();
/// Bytes of dynamic shared memory of its block.
int dynamic_shared_bytes();

/// Another warp or lane may go on here: before anything that others can see. Schedules decide.
void may_yield(Site site);
/// This thread waits for another in a loop: another one goes on.
void spin(Site site);

// ---- shared memory -----------------------------------------------------------------------------

/// Addresses in the shared window, in which no object is at 0.
std::uint32_t shared_address(const void* pointer, Site site);
/// `bytes` there, which have to be of this block's, at a multiple of `align`.
std::byte* find_shared(std::uint32_t address, int bytes, int align, const char* what, Site site);
/// The same for who reads or writes them now: no copy into them is under way.
std::byte* shared_pointer(std::uint32_t address, int bytes, int align, const char* what, Site site);
/// The beginning of the block's dynamic shared memory.
std::byte* dynamic_shared();
/// A store that no race detector looks at. `has_proxies`: the thread has to fence it before copies
/// of TMA and products of its own warp read it.
void store_quietly(void* to, const void* from, std::size_t bytes, bool has_proxies = false);
/// The block's own variable of this name, for as long as it lives. `key`: one for each variable.
void* static_shared(const void* key, std::size_t bytes, std::size_t align);

// ---- meetings ----------------------------------------------------------------------------------

/// All lanes of `mask` that have not ended come here with the same `what`; the last one runs
/// `complete` over what each has brought (lanes[l]; null where l is not in the mask).
/// orders_memory: what each has written before is seen by all behind it.
using Complete = void (*)(void* const (&lanes)[32], unsigned mask);
void meet(unsigned mask, const char* what, void* data, Complete complete, bool orders_memory,
          Site site);
/// The same for instructions that all 32 lanes take together.
void meet_all(const char* what, void* data, Complete complete, Site site);

/// Barrier `id` of the block, for so many threads (0: all that have not ended). `waits` false: only
/// arrives. Gives whether any thread of a barrier for all brought `predicate`.
bool block_barrier(int id, int threads, bool waits, bool predicate, const char* what, Site site);

// ---- mbarriers, in eight bytes of shared memory ------------------------------------------------

void barrier_init(void* word, int arrivals, Site site);
/// Arrives; `bytes` are announced with it.
void barrier_arrive(void* word, int bytes, Site site);
void barrier_wait(void* word, std::uint32_t parity, Site site);
/// cp.async.mbarrier.arrive: an arrival more, which comes when this thread's copies are there.
void barrier_expect_copies(void* word, Site site);

// ---- what happens later ------------------------------------------------------------------------

/// cp.async of this thread: `size` bytes, of which the first `bytes` are read and the rest are 0.
void copy_async(std::uint32_t to, const void* from, int size, int bytes, Site site);
void commit_copies();
void wait_copies(int pending, Site site);

/// A copy of TMA into this block's shared memory: `land` writes it, and then `bytes`
/// are counted on `barrier`. Until then the bytes at `to` are poison. `land` tells the race
/// detector what it reads and writes (engine_reads, engine_writes).
void copy_by_engine(std::uint32_t to, int bytes, void* barrier, std::function<void()> land,
                    Site site);
void engine_reads(const void* from, std::size_t bytes);
void engine_writes(void* to, std::size_t bytes);

/// A product of this warp's on the tensor cores (wgmma), run at its group's commit or later, at the
/// latest when the warp waits for the group. All lanes call it together; the accumulators of the
/// lanes are poison meanwhile, so `run` gets them beside what each lane has brought.
using Product = std::function<void(void* const (&lanes)[32], float* const (&sums)[32])>;
void begin_products(Site site);
void queue_product(void* data, std::size_t bytes, float* accumulators, int count, Product run,
                   Site site);
void commit_products(Site site);
void wait_products(int pending, Site site);
/// An operand of a product that lies in shared memory.
void product_reads(const void* from, std::size_t bytes);

/// Fences between ordinary accesses and those of TMA and of products: of shared memory,
/// of global memory.
void fence_shared_proxy(Site site);
void fence_global_proxy(Site site);

// ---- kernels that overlap ----------------------------------------------------------------------

void let_next_kernel_start();
void wait_for_kernels_before(Site site);

// ---- memory that other GPUs see ----------------------------------------------------------------

/// 4 or 8 aligned bytes as a whole: to memory, where they arrive at some later time, those of one
/// address in order; from memory, or what this thread itself has sent there last.
void send_word(void* to, std::uint64_t value, int bytes, Site site);
std::uint64_t fetch_word(const void* from, int bytes, Site site);
/// The same, and what its writer wrote before is seen behind it. The writer is a stream, or
/// count_word: words that kernels send order nothing.
std::uint64_t acquire_word(const void* from, int bytes, Site site);
/// Adds 1 to the low half of a word once what this grid has sent before is there.
void count_word(std::uint64_t* word, std::uint64_t more, Site site);
/// What this thread has sent arrives before what it sends from here on.
void fence_words(Site site);

}  // namespace longspan::simulated
