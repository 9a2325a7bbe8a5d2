// The machine on which CUDA kernels run without a GPU: each CUDA thread is a fiber, warps are
// scheduled by a seed, and asynchronous operations of a GPU happen early, late, in bursts, in any
// order that its rules allow. It has two users: the instructions (arch/ and the built-ins), called
// by the running thread, and the stand-in of the runtime, which starts kernels and runs the
// machine. Only one host thread at a time is inside: the one that holds the runtime's lock.
//
// Sources: the CUDA programming guide and the PTX manual, for what is allowed; Burckhardt et al.,
// "A randomized scheduler with probabilistic guarantees of finding bugs" (2010), for schedules.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <string>

namespace longspan::simulated {

/// The location of an instruction in the kernels' sources.
using Site = std::source_location;

/// Ends the process with the error, the running thread, the position of each warp, and the seed.
[[noreturn]] void fail(const std::string& what, Site site = Site::current());

// ---- chance ------------------------------------------------------------------------------------

/// A seed determines everything. LONGSPAN_SIMULATED_SEED sets the first, and each test of a program
/// begins its own schedule (schedules.hpp).
void begin_schedule(std::uint64_t seed);
std::uint64_t schedule_seed();
/// 0 .. below - 1.
unsigned pick(unsigned below);
bool chance(double probability);

// ---- for the runtime (runtime/) ----------------------------------------------------------------

/// A launch.
struct Kernel {
  std::function<void()> body;  // of every thread
  dim3 grid, block;
  std::size_t shared_bytes = 0;  // dynamic, of a block
  const char* name = "";
};

/// A launch that has started.
class Grid;
using GridHandle = std::shared_ptr<Grid>;

/// Begins a launch on a device. `before`: the launch whose end wait_for_kernels_before() awaits;
/// only its lets_next_start() need be true. Null: none.
GridHandle start(Kernel kernel, int device, GridHandle before);
bool has_ended(const Grid& grid);
/// Whether all blocks have called let_next_kernel_start(), or have ended.
bool lets_next_start(const Grid& grid);

/// Runs some warp for a while, or lets a copy land, up to `most` times: fewer if a launch ends or
/// lets the next one start. False: nothing that is resident can move.
bool run_slices(int most);

/// Nothing can move, nor ever will: reports the position of each warp, and ends the process.
[[noreturn]] void report_standstill();

/// For the race detector: makes the host's writes so far visible to kernels that start, and the
/// writes of ended kernels visible to the host, at calls that order the two.
void order_host_before_kernels();
void order_kernels_before_host();

/// The properties of the GPU that this build simulates (LONGSPAN_SIMULATED_ARCH: 80, 89, 90).
struct Properties {
  int major, minor, multiprocessors;
  int shared_bytes;        // of a multiprocessor
  int block_shared_bytes;  // the most that a block may have of it
  int own_shared_bytes;    // of each block, besides what it asks for
  int most_threads;        // of a multiprocessor
};
const Properties& properties();
/// Blocks that are resident on a multiprocessor at a time; 0: one does not fit.
int resident_blocks(int threads, std::size_t shared_bytes);

/// Delivers all words in flight to other GPUs (arch/peer.cuh).
void deliver_words();

/// The clock of the GPUs, in nanoseconds. It advances with the machine, and with the host's clock
/// if ranks are processes.
std::uint64_t nanoseconds();
void use_host_clock();

}  // namespace longspan::simulated
