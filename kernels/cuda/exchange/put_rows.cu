// Puts rows into the memory of all ranks (RowPuts). A few blocks are enough for the links between
// GPUs; an attention that is queued behind them begins beside them, on the other multiprocessors.
#include <algorithm>

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/exchange/exchange.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 1024;  // few multiprocessors have many loads under way
constexpr int kAtOnce = 4;      // of a lane
constexpr int kShare = 6;       // beside an attention one of so many multiprocessors puts

/// One warp of the grid. All of them put one piece after the other.
class Putter {
 public:
  __device__ explicit Putter(const RowPuts& puts)
      : puts_(puts),
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
  /// Where a lane is among the words of some rows. The lanes are side by side: as many of a row as
  /// it has words, up to 32, and as many rows.
  template <class Byte, class Word>
  struct Cursor {
    Byte* at;
    int column;

    __device__ void advance(int first, int columns, int words, std::int64_t step) {
      at += columns * sizeof(Word);
      column += columns;
      if (column < words) return;
      at += step - (column - first) * static_cast<int>(sizeof(Word));
      column = first;
    }
  };

  /// Puts what a piece has of some rows of a block.
  __device__ void put(const RowPuts::Block& block, std::int64_t row, int piece) {
    switch (block.word) {
      case 16:
        return put<uint4>(block, row, piece);
      case 8:
        return put<uint2>(block, row, piece);
      case 4:
        return put<std::uint32_t>(block, row, piece);
      case 2:
        return put<std::uint16_t>(block, row, piece);
      default:
        return put<std::uint8_t>(block, row, piece);
    }
  }
  template <class Word>
  __device__ void put(const RowPuts::Block& block, std::int64_t row, int piece) {
    constexpr int kWord = sizeof(Word);
    const int words = block.width_of(piece) / kWord;
    const int rows =
        static_cast<int>(min(static_cast<std::int64_t>(puts_.rows_a_unit), block.rows - row));
    if (words <= 0 || rows <= 0) return;
    int columns = 32;
    while (columns / 2 >= words) columns /= 2;
    const int side_by_side = 32 / columns, column = lane_ % columns;
    row += lane_ / columns;
    const std::int64_t first =
        std::int64_t{piece / block.every} * block.part_width + std::int64_t{column} * kWord;
    Cursor<const std::byte, Word> from{block.from + row * block.from_pitch + first, column};
    Cursor<std::byte, Word> to{block.to + row * block.to_pitch + first, column};
    const std::int64_t from_step = side_by_side * block.from_pitch,
                       to_step = side_by_side * block.to_pitch;
    int left = (words - column + columns - 1) / columns *  // in a row, and rows
               ((rows - lane_ / columns + side_by_side - 1) / side_by_side);
#pragma unroll 1
    for (; left > 0; left -= kAtOnce) {
      Word held[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i < left) held[i] = *reinterpret_cast<const Word*>(from.at);
        from.advance(column, columns, words, from_step);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i < left) *reinterpret_cast<Word*>(to.at) = held[i];
        to.advance(column, columns, words, to_step);
      }
    }
  }

  /// Tells all ranks that a piece is there, once every warp has put its part.
  __device__ void finish(int piece) {
    __threadfence_system();
    __syncwarp();
    unsigned before = 0;
    if (lane_ == 0) before = atomicInc(puts_.done + piece, warps_ - 1);
    if (__shfl_sync(0xffffffff, before, 0) == warps_ - 1) signal();
  }

  __device__ void put_word() {
    if (puts_.say.said != nullptr && lane_ < puts_.ranks)
      arch::store_whole(puts_.words[lane_], said(puts_.say.hash, puts_.say.contents));
    signal();
  }

  /// What this warp knows to be put is seen by whoever sees the signal.
  __device__ void signal() {
    __threadfence_system();
    __syncwarp();
    if (lane_ < puts_.ranks) arch::count_release(puts_.signals[lane_] + puts_.rank);
  }

  const RowPuts& puts_;
  const int lane_;
  const unsigned warp_, warps_;
};

__global__ __launch_bounds__(kThreads) void put_rows_kernel(const __grid_constant__ RowPuts puts) {
  arch::let_next_kernel_start();  // the attention
  Putter(puts).run();
}

}  // namespace

void put_rows(const RowPuts& puts, int multiprocessors, cudaStream_t stream) {
  const int share = puts.beside ? kShare : 1;
  const auto blocks = static_cast<unsigned>(std::max(multiprocessors / share, 1));
  launch_kernel(put_rows_kernel, {blocks, kThreads, stream}, puts);
}

}  // namespace longspan::kernels::cuda
