// The machine on which CUDA kernels run without a GPU: each CUDA thread is a fiber, warps are
// scheduled by a seed, and what a GPU does asynchronously happens early, late, in bursts, in any
// order that its rules allow. Two kinds of code see it: the instructions (arch/ and the built-ins),
// called by the thread that runs, and the stand-in of the runtime, which starts kernels and lets
// the machine run. One host thread at a time is inside: whoever holds the runtime's lock.
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

/// Where in the kernels' sources an instruction stands.
using Site = std::source_location;

/// Ends the process with what went wrong, who ran, where each warp stands, and the seed.
[[noreturn]] void fail(const std::string& what, Site site = Site::current());

// ---- chance ------------------------------------------------------------------------------------

/// All that a seed decides. LONGSPAN_SIMULATED_SEED sets the first, and each test of a program
/// begins a schedule of its own (schedules.hpp).
void begin_schedule(std::uint64_t seed);
std::uint64_t schedule_seed();
/// 0 .. below - 1.
unsigned pick(unsigned below);
bool chance(double probability);

// ---- what the runtime asks for (runtime/) ------------------------------------------------------

/// A launch.
struct Kernel {
  std::function<void()> body;  // of every thread
  dim3 grid, block;
  std::size_t shared_bytes = 0;  // dynamic, of a block
  const char* name = "";
};

/// A launch that was started.
class Grid;
using GridHandle = std::shared_ptr<Grid>;

/// Begins a launch on a device. `before`: the launch whose end wait_for_kernels_before() awaits, of
/// which only lets_next_start() need be true; null: none.
GridHandle start(Kernel kernel, int device, GridHandle before);
bool has_ended(const Grid& grid);
/// All blocks have come to let_next_kernel_start(), or have ended.
bool lets_next_start(const Grid& grid);

/// Runs some warp for a while, or lets a copy land, up to `most` times: fewer where a launch ends
/// or lets the next one start. False: nothing that is resident can move.
bool run_slices(int most);

/// Nothing can move, nor will: names the place where each warp stands, and ends the process.
[[noreturn]] void report_standstill();

/// What the host wrote so far is seen by kernels that start, and what ended kernels wrote is seen
/// by the host: for the race detector, at calls that order the two.
void order_host_before_kernels();
void order_kernels_before_host();

/// The properties of the GPU that this build stands for (LONGSPAN_SIMULATED_ARCH: 80, 89, 90).
struct Properties {
  int major, minor, multiprocessors;
  int shared_bytes;        // of a multiprocessor
  int block_shared_bytes;  // of which a block may have
  int own_shared_bytes;    // of each block, beside what it asks for
  int most_threads;        // of a multiprocessor
};
const Properties& properties();
/// Blocks of a multiprocessor that are resident at a time; 0: one does not fit.
int resident_blocks(int threads, std::size_t shared_bytes);

/// Words on their way to other GPUs have arrived (arch/peer.cuh).
void deliver_words();

/// The clock of the GPUs, in nanoseconds. It runs with the machine, and with that of the host where
/// ranks are processes.
std::uint64_t nanoseconds();
void use_host_clock();

}  // namespace longspan::simulated
