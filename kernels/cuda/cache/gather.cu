// Copies keys and values from pages of any layout into contiguous rows. A block takes 64 keys of
// some heads and finds their rows once. If the layout has them contiguous, a thread then copies
// four times 16 bytes, all requested at once. If a page stores the keys of one column adjacently,
// they are transposed through shared memory.
#include "kernels/cuda/cache/gather.hpp"

#include <algorithm>

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/common/access.hpp"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/divisor.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/dispatch/families.hpp"
#include "kernels/faults.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kKeys = 64;  // of a block
constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements of 16 bytes
constexpr int kAtOnce = 4;  // vectors that a thread requests at once
constexpr int kMostDim = 256;
constexpr unsigned kBlocksOfGpu = 1024;  // more bring no gain, since a block keeps 16 KB in flight
constexpr std::size_t kMostRoom = std::size_t{4} << 30;

using Bits = std::uint16_t;  // of an element

/// The copy of the keys, or of the values.
struct Copy {
  KvRows source;
  Access access;
  Rows fresh;
  bool fresh_whole;  // they can be read 16 bytes at a time
  Bits* to;          // [sequences, capacity, kv_heads, dim]
};

struct GatherTask {
  Geometry p;
  Pages pages;
  Copy copies[2];
  std::int64_t capacity;
  std::int64_t* key_start;
  int* ticket;
  Divisor by_page, by_chunks;  // by keys of a page; by vectors of a row
};

/// Packs element(0), element(1) ... into a vector.
template <class Element>
__device__ uint4 pack(const Element& element) {
  uint4 packed;
  std::uint32_t* words = reinterpret_cast<std::uint32_t*>(&packed);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i)
    words[i] = element(2 * i) | static_cast<std::uint32_t>(element(2 * i + 1)) << 16;
  return packed;
}

/// The keys [first + begin, first + end) of one sequence; from `in_pages` on they are fresh.
struct Block {
  std::int64_t first;
  int begin, end, in_pages;
};

/// Copies the block's share of pages that store whole groups of keys adjacently to rows of `tile`.
__device__ void transpose(Bits (*tile)[kMostDim + kVector], const Bits* const* rows,
                          const KvRows& source, std::int64_t of_head, const Block& block, int dim) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kKeys / kVector * dim; i += kThreads) {
    const int group = i % (kKeys / kVector) * kVector, d = i / (kKeys / kVector);
    if (group + kVector <= block.begin || group >= block.in_pages) continue;
    const int found = max(group, block.begin);
    const uint4 eight =
        *reinterpret_cast<const uint4*>(rows[found] - (found - group) + of_head + source.column(d));
    const Bits* bits = reinterpret_cast<const Bits*>(&eight);
#pragma unroll
    for (int j = 0; j < kVector; ++j) tile[group + j][d] = bits[j];
  }
}

/// Gathers. blockIdx.x = 64 keys, blockIdx.y = a head and every gridDim.y-th after it, blockIdx.z =
/// a sequence's keys or values.
__global__ __launch_bounds__(kThreads) void gather_kernel(const __grid_constant__ GatherTask call) {
  std::byte* const memory = arch::shared_by_16;               // for Access::keys
  auto& rows = arch::shared_variable<const Bits* [kKeys]>();  // of a key of head 0
  arch::let_next_kernel_start();  // attention of short sequences, which then waits for the copy
  const auto tile = reinterpret_cast<Bits(*)[kMostDim + kVector]>(memory);
  const Geometry& p = call.p;
  const int b = static_cast<int>(blockIdx.z / 2), own = static_cast<int>(threadIdx.x);
  const Copy& copy = call.copies[blockIdx.z % 2];
  const KvRows& source = copy.source;
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z % 2 == 0 && own == 0) {
    call.key_start[b] = b * call.capacity;
    if (b == 0) *call.ticket = 0;
  }
  const std::int64_t q_len = p.batch.query_len(b, p.tokens), kv_len = p.batch.keys(b, p.shard);
  const std::int64_t context =
      copy.fresh.data == nullptr ? kv_len : max(kv_len - q_len, std::int64_t{0});
  const Interval needed = needed_keys(p, b);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kKeys;
  const auto here = [&](std::int64_t key) {
    return static_cast<int>(min(max(key - first, std::int64_t{0}), std::int64_t{kKeys}));
  };
  const Block block{first, here(needed.begin), here(min(needed.end, call.capacity)), here(context)};
  if (block.begin >= block.end) return;

  if (own >= block.begin && own < block.end) {
    const int key = static_cast<int>(first) + own;
    if (own < block.in_pages) {
      const std::int64_t page =
          call.pages
              .table[b * call.pages.row_stride + key / call.by_page * call.pages.column_stride];
      rows[own] = source.at<const Bits>(key % call.by_page, 0) + page * source.page_stride;
    } else {
      rows[own] = copy.fresh.at<const Bits>(p.batch.first_row(b) + key - context, 0);
    }
  }
  __syncthreads();

  const int chunks = p.head_dim / kVector;
  for (int head = static_cast<int>(blockIdx.y); head < p.kv_heads;
       head += static_cast<int>(gridDim.y)) {
    const std::int64_t of_head = head * source.head_stride;
    if (copy.access == Access::keys) {
      __syncthreads();  // the last head's was read
      transpose(tile, rows, source, of_head, block, p.head_dim);
      __syncthreads();
    }
    const auto load = [&](int key, int d) {
      if (key >= block.in_pages) {
        const Bits* from = rows[key] + head * copy.fresh.head_stride + d;
        return copy.fresh_whole ? *reinterpret_cast<const uint4*>(from)
                                : pack([&](int i) { return from[i]; });
      }
      const Bits* row = rows[key] + of_head;
      if (copy.access == Access::chunks)
        return *reinterpret_cast<const uint4*>(row + source.column(d));
      if (copy.access == Access::keys) return *reinterpret_cast<const uint4*>(&tile[key][d]);
      return pack([&](int i) { return row[source.column(d + i)]; });
    };
    Bits* const to = copy.to + ((b * call.capacity + first) * p.kv_heads + head) * p.head_dim;
    for (int i = own; i < kKeys * chunks; i += kAtOnce * kThreads) {
      uint4 vectors[kAtOnce];
      const auto at = [&](int j, const auto& use) {
        const int vector = i + j * kThreads, key = vector / call.by_chunks;
        if (key >= block.begin && key < block.end) use(key, (vector - key * chunks) * kVector);
      };
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) at(j, [&](int key, int d) { vectors[j] = load(key, d); });
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        at(j, [&](int key, int d) {
          *reinterpret_cast<uint4*>(to + static_cast<std::int64_t>(key) * p.kv_heads * p.head_dim +
                                    d) = vectors[j];
        });
    }
  }
}

/// The bytes of a key and its value as they are gathered, which has the type of the products.
std::int64_t bytes_of_key(const Geometry& p) {
  return std::int64_t{2} * p.kv_heads * storage_of(p.dtype).row_bytes(p.head_dim);
}

/// The bytes of the first keys and, after them, the ticket.
std::size_t table_bytes(const Geometry& p) {
  return (static_cast<std::size_t>(p.batch.size + 1) * sizeof(std::int64_t) + 255) / 256 * 256;
}

}  // namespace

std::size_t gather_room(const AttendParams& bounds, const Gpu& gpu) {
  AttendParams contiguous = bounds;
  contiguous.pages = {};
  contiguous.k = contiguous.v = {};
  contiguous.q = {};
  contiguous.shard = Shard::contiguous(0, 0, 1);
  if (bounds.invariant || bounds.max_kv_len == 0 || !may_hold(bounds, Lengths::only_long) ||
      !is_of_hopper(serving(contiguous, kind_of(contiguous, Lengths::only_long, gpu)).id))
    return 0;
  const std::size_t keys =
      static_cast<std::size_t>((bounds.max_kv_len + kKeys - 1) / kKeys * kKeys);
  const std::size_t bytes = keys * static_cast<std::size_t>(bounds.batch.size) *
                            static_cast<std::size_t>(bytes_of_key(bounds));
  return bytes > kMostRoom ? 0 : bytes + table_bytes(bounds);
}

std::int64_t gather_capacity(const Geometry& p, std::size_t room_bytes) {
  if (room_bytes <= table_bytes(p)) return 0;
  return static_cast<std::int64_t>(room_bytes - table_bytes(p)) / (p.batch.size * bytes_of_key(p));
}

AttendParams gather_keys(const GatheredParams& g, cudaStream_t stream) {
  AttendParams p = g.attend;
  GatherTask call{.p = p,
                  .pages = p.pages,
                  .capacity = gather_capacity(p, g.room_bytes),
                  .by_page = Divisor(static_cast<std::uint32_t>(p.pages.size)),
                  .by_chunks = Divisor(static_cast<std::uint32_t>(p.head_dim / kVector))};
  const std::int64_t half = p.batch.size * call.capacity * bytes_of_key(p) / 2;
  const auto copy_of = [&](const KvRows& source, const Rows& fresh, std::byte* to) {
    return Copy{source, access_of(source, p.pages, sizeof(Bits), p.head_dim), fresh,
                is_aligned<kVector>(fresh, p.dtype), reinterpret_cast<Bits*>(to)};
  };
  call.copies[0] = copy_of(p.k, g.new_k, g.room);
  call.copies[1] = copy_of(p.v, g.new_v, g.room + half);
  call.key_start = reinterpret_cast<std::int64_t*>(g.room + 2 * half);
  call.ticket = reinterpret_cast<int*>(call.key_start + p.batch.size);
  const auto blocks = static_cast<unsigned>((call.capacity + kKeys - 1) / kKeys);
  const auto halves = static_cast<unsigned>(2 * p.batch.size);
  const unsigned heads = std::min((kBlocksOfGpu + blocks * halves - 1) / (blocks * halves),
                                  static_cast<unsigned>(p.kv_heads));
  const bool transposes =
      call.copies[0].access == Access::keys || call.copies[1].access == Access::keys;
  const std::size_t tile = transposes ? sizeof(Bits) * kKeys * (kMostDim + kVector) : 0;
  launch_kernel(gather_kernel, {dim3(blocks, heads, halves), kThreads, stream, tile}, call);

  const std::int64_t row = std::int64_t{p.kv_heads} * p.head_dim;
  p.k = KvRows(call.copies[0].to, row, p.head_dim);
  p.v = KvRows(call.copies[1].to, row, p.head_dim);
  p.pages = {};
  p.batch.key_start = call.key_start;
  p.ticket = call.ticket;
  return p;
}

}  // namespace longspan::kernels::cuda
