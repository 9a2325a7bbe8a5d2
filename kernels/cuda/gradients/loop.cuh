// The outer loop of backward's kernels (plan.hpp has the method): over work tiles, and over the
// tiles that stream by an owned one. A policy multiplies: FFMA, or mma of tf32 or of 16 bits.
//
// What the loop knows of a tile is found ahead: thread 0 steps the walk three tiles ahead, threads
// find the rows or keys of a tile two ahead, and the policy may load one ahead. One barrier for
// each tile orders all this.
#pragma once

#include <type_traits>

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/gradients/first_token.cuh"
#include "kernels/cuda/gradients/gradients.hpp"
#include "kernels/cuda/gradients/sum_stack.cuh"
#include "kernels/cuda/gradients/tiles.cuh"
#include "kernels/cuda/gradients/weigh.cuh"

namespace longspan::kernels::cuda {

/// A work tile, and what streams by it, in shared memory.
template <bool kRowsOwn, int kOwn, int kStream>
struct GradientWork {
  template <bool kRows, int kCount>
  using Slots = std::conditional_t<kRows, RowSlots<kCount>, KeySlots<kCount>>;

  static constexpr int kTiles = 4, kSlots = 3;

  Gradient gradient;
  int kv_head;
  int column;          // the first of the panel
  int count;           // rows or keys that are owned; 0: nothing to do
  std::int64_t first;  // of them
  Sequence sequence;
  View view;        // dq: of the owned rows; else all keys
  Interval places;  // dk, dv: of the owned keys
  Interval tokens;  // dk, dv: that may see them
  StreamWalk walk;  // of thread 0
  StreamTile tiles[kTiles];
  Slots<kRowsOwn, kOwn> own;
  Slots<!kRowsOwn, kStream> stream[kSlots];

  __device__ const RowSlots<kRowsOwn ? kOwn : kStream>& rows(int slot) const {
    if constexpr (kRowsOwn)
      return own;
    else
      return stream[slot];
  }
  __device__ const KeySlots<kRowsOwn ? kStream : kOwn>& keys(int slot) const {
    if constexpr (kRowsOwn)
      return stream[slot];
    else
      return own;
  }
  /// Whether every owned one sees, or is seen by, all of a tile: no mask is needed.
  __device__ bool full(const StreamTile& tile, int slot) const {
    if (view.table != nullptr) return false;
    if constexpr (kRowsOwn) {
      return view.full(tile.first, kStream);
    } else {
      const Interval &top = stream[slot].view[0], &bottom = stream[slot].view[kStream - 1];
      return bottom.begin <= places.begin && top.end >= places.end;
    }
  }
};

template <class Products>
class GradientBlock {
  static constexpr bool kRowsOwn = Products::kRowsOwn;
  static constexpr int kOwn = Products::kOwn, kStream = Products::kStream;
  static constexpr int kThreads = Products::kThreads;
  static_assert(kThreads >= 64);

 public:
  using Work = GradientWork<kRowsOwn, kOwn, kStream>;
  static constexpr int kWorkBytes = (static_cast<int>(sizeof(Work)) + 127) / 128 * 128;
  static constexpr int kBytes = Products::kBytes + kWorkBytes;

  __device__ __forceinline__ GradientBlock(const GradientParams& params,
                                           const GradientPlan& of_launch, std::byte* shared)
      : p_(params),
        plan_(of_launch),
        work_(*reinterpret_cast<Work*>(shared + Products::kBytes)),
        products_(params, of_launch, work_, shared) {}

  __device__ __forceinline__ void take(int index) {
    __syncthreads();  // the last work tile is done with shared memory
    if (threadIdx.x == 0) find(index);
    __syncthreads();
    if (work_.count == 0) return;
    find_owned();
    __syncthreads();
    find_part();
    __syncthreads();
    if (threadIdx.x == 0) start_walk();
    __syncthreads();
    find_slots(0);
    find_slots(1);
    __syncthreads();
    products_.load_owned();
    products_.load(0);

    float sums[Products::kFloats];
#pragma unroll
    for (int i = 0; i < Products::kFloats; ++i) sums[i] = 0.0f;
    SumStack<Products::kFloats, kThreads> stack(plan_.stack);
#pragma unroll 1
    for (int tile = 0; tile_at(tile).first >= 0; ++tile) {
      products_.wait();
      __syncthreads();  // this tile and the slots of the next are there; the last tile is done
      products_.load(tile + 1);
      find_slots(tile + 2);
      if (threadIdx.x == 0) tile_at(tile + 3) = work_.walk.template next<kStream>();
      products_.multiply(tile_at(tile), tile, sums);
      const StreamTile &own = tile_at(tile), &next = tile_at(tile + 1);
      if (next.first >= 0 && next.leaf != own.leaf) stack.finish(sums, own.leaf, next.leaf);
    }
    products_.wait();
    stack.fold_all(sums);
    products_.store(sums);
  }

 private:
  __device__ StreamTile& tile_at(int tile) const { return work_.tiles[tile % Work::kTiles]; }

  /// Thread 0 finds the work tile.
  __device__ __forceinline__ void find(int index) {
    const int rest = index / plan_.by_panels, panel = index % plan_.by_panels;
    int tile = rest % plan_.by_tiles;
    if (kRowsOwn) tile = plan_.tiles - 1 - tile;  // the last rows see the most keys
    const bool second = panel >= plan_.first_panels;
    work_.gradient = kRowsOwn ? Gradient::dq : second ? Gradient::dv : Gradient::dk;
    work_.column = (second ? panel - plan_.first_panels : panel) * plan_.columns;
    work_.kv_head = rest / plan_.by_tiles;
    const int b = last_start(p_.batch.size, std::int64_t{tile},
                             [&](int i) { return first_owned_tile(p_, plan_, i); });
    const std::int64_t own = tile - first_owned_tile(p_, plan_, b);
    work_.sequence = sequence_of(p_, b);
    const std::int64_t rows = p_.batch.query_len(b, p_.tokens) * group_of(p_);
    const std::int64_t keys = work_.sequence.local_len;
    work_.first = own * plan_.tile;
    const std::int64_t left = (kRowsOwn ? rows : keys) - work_.first;
    work_.count = static_cast<int>(own < 0 || left < 0 ? 0 : min(left, std::int64_t{kOwn}));
    work_.view = {};
    work_.view.any = {0, keys};
    if (p_.shard.layout == Layout::listed) work_.view.table = p_.shard.table;
    work_.view.positions = {0, work_.sequence.kv_len};
    work_.walk = {};
    work_.walk.total = kRowsOwn ? keys : rows;
    if (!p_.invariant) return;
    const Shard shard = (kRowsOwn ? p_.shard : p_.queries).for_sequence(b);
    work_.walk.order = shard.order(kRowsOwn ? work_.sequence.kv_len : p_.whole_query_len(b));
    work_.walk.unit = kRowsOwn ? kSegment : std::int64_t{kSegment} * group_of(p_);
  }

  __device__ __forceinline__ void find_owned() {
    for (int i = static_cast<int>(threadIdx.x); i < kOwn; i += kThreads) {
      if constexpr (kRowsOwn)
        work_.own.find(i, p_, plan_.by_group, work_.sequence, work_.kv_head, work_.first,
                       work_.count);
      else
        work_.own.find(i, p_, work_.sequence, work_.kv_head, work_.first, work_.count, work_.view);
    }
  }

  /// Finds what may meet the owned rows or keys.
  __device__ __forceinline__ void find_part() {
    if constexpr (kRowsOwn) {
      if (threadIdx.x == 0)
        work_.view = tile_view(p_, work_.sequence, 0, work_.own.view[0], work_.own.view[kOwn - 1]);
    } else {
      if (threadIdx.x >= 64) return;
      Interval places{work_.first, work_.first + work_.count};
      if (work_.view.table != nullptr) {
        places = {work_.own.place[0], work_.own.place[0] + 1};
        for (int i = 1; i < work_.count; ++i) {
          places.begin = min(places.begin, work_.own.place[i]);
          places.end = max(places.end, work_.own.place[i] + 1);
        }
      }
      const std::int64_t tokens = p_.batch.query_len(work_.sequence.index, p_.tokens);
      if (threadIdx.x < 32) {
        const std::int64_t begin = first_token(tokens, [&](std::int64_t token) {
          return row_view(p_, work_.sequence, token, 0).end > places.begin;
        });
        if (threadIdx.x == 0) work_.tokens.begin = begin;
        if (threadIdx.x == 0) work_.places = places;
      } else {
        const std::int64_t end = first_token(tokens, [&](std::int64_t token) {
          return row_view(p_, work_.sequence, token, 0).begin >= places.end;
        });
        if (threadIdx.x == 32) work_.tokens.end = end;
      }
    }
  }

  __device__ __forceinline__ void start_walk() {
    if constexpr (kRowsOwn)
      work_.walk.part = work_.view.any;
    else
      work_.walk.part = {work_.tokens.begin * group_of(p_), work_.tokens.end * group_of(p_)};
    for (int i = 0; i < 3; ++i) tile_at(i) = work_.walk.template next<kStream>();
  }

  /// Finds the rows or keys of a tile. All warps find as many, so that none waits for another.
  __device__ __forceinline__ void find_slots(int number) {
    constexpr int kOfWarp = kStream / (kThreads / 32);
    static_assert(kOfWarp <= 32 && kStream % (kThreads / 32) == 0);
    const StreamTile& tile = tile_at(number);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (tile.first < 0 || lane >= kOfWarp) return;
    const int i = static_cast<int>(threadIdx.x) / 32 * kOfWarp + lane;
    auto& slots = work_.stream[number % Work::kSlots];
    if constexpr (kRowsOwn)
      slots.find(i, p_, work_.sequence, work_.kv_head, tile.first, tile.count, work_.view);
    else
      slots.find(i, p_, plan_.by_group, work_.sequence, work_.kv_head, tile.first, tile.count);
  }

  const GradientParams& p_;
  const GradientPlan& plan_;
  Work& work_;
  Products products_;
};

template <class Products>
__global__ __launch_bounds__(Products::kThreads, Products::kBlocks) void attend_gradients_kernel(
    const __grid_constant__ GradientParams p, const __grid_constant__ GradientPlan plan) {
  GradientBlock<Products> block(p, plan, arch::shared_by_128);
  for (int index = static_cast<int>(blockIdx.x); index < plan.works;
       index += static_cast<int>(gridDim.x))
    block.take(index);
}

template <class Products>
GradientKernel gradient_kernel() {
  return {attend_gradients_kernel<Products>,
          Products::kThreads,
          GradientBlock<Products>::kBytes,
          Products::kOwn,
          Products::kColumns,
          Products::kBlocks};
}

}  // namespace longspan::kernels::cuda
