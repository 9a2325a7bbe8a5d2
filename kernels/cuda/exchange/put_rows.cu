// Puts rows into the memory of all ranks (RowPuts). A few blocks saturate the links between GPUs;
// an attention that is queued after them runs beside them, on the other multiprocessors.
#include <algorithm>

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/common/await_count.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/exchange/copy_words.cuh"
#include "kernels/cuda/exchange/exchange.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 1024;  // few multiprocessors keep many loads in flight
constexpr int kShare = 6;       // beside an attention one in this many multiprocessors puts

/// Whether no block of this kernel has begun before. A warp calls it, once.
__device__ bool begins_first(PutFlags& own) {
  unsigned earlier = 0;
  if (threadIdx.x == 0) earlier = atomicInc(&own.blocks, gridDim.x - 1);
  return __shfl_sync(0xffffffff, earlier, 0) == 0;
}

/// The block that begins first opens the run, before the attention may begin: it waits until all
/// earlier puts of the others here have arrived, and tells them that this rank has room. Every
/// block then waits until every rank has room. Blocks begin in any order, and a block that has not
/// begun, because work of other streams is in its way, keeps no other rank waiting.
__device__ void meet(const PutRanks& among) {
  const int lane = static_cast<int>(threadIdx.x);
  PutFlags& own = *among.flags[among.rank];
  const std::uint64_t runs = arch::load_whole(&own.runs);  // which the last warp increments
  const bool other = lane < among.ranks && lane != among.rank;
  if (threadIdx.x < 32 && begins_first(own)) {
    if (lane == 0) arch::store_whole(&own.before, runs * PutFlags::kRun);
    if (other) await_count(own, own.here + lane, runs * PutFlags::kRun);
    __syncwarp();
    if (other) arch::count_release(among.flags[lane]->free + among.rank, 1);
    __threadfence();
  }
  __syncthreads();
  arch::let_next_kernel_start();
  if (threadIdx.x < 32 && other) await_count(own, own.free + lane, runs + 1);
  __syncthreads();
}

/// One warp of the grid. All of them put one piece after another.
class Putter {
 public:
  __device__ explicit Putter(const RowPuts& puts)
      : puts_(puts),
        own_(*puts.among.flags[puts.among.rank]),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(threadIdx.x / 32 * gridDim.x + blockIdx.x),
        warps_(gridDim.x * (kThreads / 32)) {}

  __device__ void run() {
    if (warp_ == 0) put_word();
#pragma unroll 1
    for (int piece = 0; piece < puts_.pieces; ++piece) {
#pragma unroll 1
      for (std::int64_t unit = warp_; unit < puts_.units; unit += warps_)
        put(puts_.block[unit % puts_.blocks], unit / puts_.blocks * puts_.rows_a_unit, piece);
      finish(piece);
    }
  }

 private:
  /// Puts the part of some rows of a block that belongs to a piece.
  __device__ void put(const RowPuts::Block& block, std::int64_t row, int piece) {
    StridedCopy some = block.copy;
    const std::int64_t column = std::int64_t{piece / block.every} * block.part_width;
    some.from += row * some.from_pitch + column;
    some.to += row * some.to_pitch + column;
    some.width = block.width_of(piece);
    some.rows = min(puts_.rows_a_unit, some.rows - row);
    if (some.width > 0 && some.rows > 0) copy_block(some, {lane_, 32});
  }

  /// Signals to all ranks that a piece has arrived, once every warp has put its part. The last warp
  /// of the last piece closes the run.
  __device__ void finish(int piece) {
    __threadfence_system();
    __syncwarp();
    unsigned before = 0;
    if (lane_ == 0) before = atomicInc(puts_.done + piece, warps_ - 1);
    if (__shfl_sync(0xffffffff, before, 0) != warps_ - 1) return;
    if (piece < puts_.pieces - 1) return count(1);
    count(PutFlags::kRun - static_cast<unsigned>(puts_.pieces));
    const std::uint64_t runs = arch::load_whole(&own_.runs) + 1;
    if (!puts_.beside && lane_ < puts_.among.ranks)
      await_count(own_, own_.here + lane_, runs * PutFlags::kRun);
    __syncwarp();
    if (lane_ == 0) arch::store_whole(&own_.runs, runs);
  }

  __device__ void put_word() {
    if (puts_.digest.to != nullptr && lane_ < puts_.among.ranks)
      arch::store_whole(puts_.digests[lane_], run_digest(puts_.digest.hash, puts_.digest.contents));
    count(1);
  }

  /// Puts that this warp has observed are visible to any thread that sees the increment.
  __device__ void count(std::uint64_t more) {
    __threadfence_system();
    __syncwarp();
    const PutRanks& among = puts_.among;
    if (lane_ < among.ranks) arch::count_release(among.flags[lane_]->here + among.rank, more);
  }

  const RowPuts& puts_;
  PutFlags& own_;
  const int lane_;
  const unsigned warp_, warps_;
};

__global__ __launch_bounds__(kThreads) void put_rows_kernel(const __grid_constant__ RowPuts puts) {
  meet(puts.among);
  Putter(puts).run();
}

}  // namespace

void put_rows(const RowPuts& puts, int multiprocessors, cudaStream_t stream) {
  const int share = puts.beside ? kShare : 1;
  const auto blocks = static_cast<unsigned>(std::max(multiprocessors / share, 1));
  launch_kernel(put_rows_kernel, {blocks, kThreads, stream}, puts);
}

}  // namespace longspan::kernels::cuda
