// The copy of keys and values out of pages of any layout into rows side by side. A block takes 64
// keys of one head; 16 bytes a thread where the layout has them in a row, a transposition through
// shared memory where a page holds the keys of one column side by side.
#include "kernels/cuda/gather.hpp"

#include <algorithm>

#include "kernels/cuda/attend_sm90.hpp"
#include "kernels/faults.hpp"
#include "src/check.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kKeys = 64;  // of a block
constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements of 16 bytes
constexpr int kMostDim = 256;
constexpr std::size_t kMostRoom = std::size_t{4} << 30;

using Bits = std::uint16_t;  // of an element

struct Call {
  AttendParams p;
  Rows fresh[2];
  Bits* to[2];  // [sequences, capacity, kv_heads, dim]
  std::int64_t capacity;
  std::int64_t* key_start;
};

enum class Way { rows, columns, elements };

/// How 16 bytes at a time can be read.
__device__ Way way_of(const KvRows& source, const Pages& pages) {
  const auto whole = [](std::int64_t elements) { return elements % kVector == 0; };
  const bool aligned = reinterpret_cast<std::uintptr_t>(source.data) % 16 == 0 &&
                       whole(source.page_stride) && whole(source.head_stride);
  const bool one = pages.size == 1;  // then rows of a page have no distance
  if (aligned && source.dim_stride == 1 && whole(source.chunk) && whole(source.chunk_stride) &&
      (one || whole(source.row_stride)))
    return Way::rows;
  if (aligned && source.row_stride == 1 && whole(pages.size) && whole(source.dim_stride) &&
      whole(source.chunk_stride))
    return Way::columns;
  return Way::elements;
}

__device__ uint4 load_elements(const Bits* from, std::int64_t step) {
  Bits e[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) e[i] = from[i * step];
  uint4 packed;
  std::uint32_t* words = reinterpret_cast<std::uint32_t*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = e[2 * i] | static_cast<std::uint32_t>(e[2 * i + 1]) << 16;
  return packed;
}

__global__ __launch_bounds__(kThreads) void gather_kernel(const __grid_constant__ Call call) {
  __shared__ alignas(16) Bits tile[kKeys][kMostDim + kVector];
  const AttendParams& p = call.p;
  const int b = static_cast<int>(blockIdx.z / 2), which = static_cast<int>(blockIdx.z % 2);
  const int head = static_cast<int>(blockIdx.y), chunks = p.dim / kVector;
  if (blockIdx.x == 0 && blockIdx.y == 0 && which == 0 && threadIdx.x == 0)
    call.key_start[b] = b * call.capacity;
  const std::int64_t q_len = p.batch.query_len(b, p.tokens), kv_len = p.batch.keys(b, p.shard);
  const Rows& fresh = call.fresh[which];
  const std::int64_t context =
      fresh.data == nullptr ? kv_len : max(kv_len - q_len, std::int64_t{0});
  const Interval needed = needed_keys(p, b);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kKeys;
  const std::int64_t begin = max(first, needed.begin);
  const std::int64_t end = min(min(first + kKeys, needed.end), call.capacity);
  if (begin >= end) return;

  const KvRows& source = which == 0 ? p.k : p.v;
  const Bits* data = static_cast<const Bits*>(source.data);
  Bits* to = call.to[which] + (b * call.capacity * p.kv_heads + head) * p.dim;
  const auto place = [&](std::int64_t key) { return to + key * p.kv_heads * p.dim; };
  const auto row = [&](std::int64_t key) {
    return data + p.pages.page(b, key) * source.page_stride +
           key % p.pages.size * source.row_stride + head * source.head_stride;
  };
  const Way way = way_of(source, p.pages);

  if (way == Way::columns && begin < context) {
    const std::int64_t last = min(end, context);
    for (int i = static_cast<int>(threadIdx.x); i < kKeys / kVector * p.dim; i += kThreads) {
      const int group = i % (kKeys / kVector), d = i / (kKeys / kVector);
      const std::int64_t key = first + group * kVector;  // pages hold whole groups
      if (key + kVector <= begin || key >= last) continue;
      const uint4 eight = *reinterpret_cast<const uint4*>(row(key) + source.column(d));
      const Bits* bits = reinterpret_cast<const Bits*>(&eight);
#pragma unroll
      for (int j = 0; j < kVector; ++j) tile[group * kVector + j][d] = bits[j];
    }
    __syncthreads();
  }

  const bool fresh_whole = reinterpret_cast<std::uintptr_t>(fresh.data) % 16 == 0 &&
                           fresh.row_stride % kVector == 0 && fresh.head_stride % kVector == 0;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * chunks; i += kThreads) {
    const std::int64_t key = first + i / chunks;
    const int d = i % chunks * kVector;
    if (key < begin || key >= end) continue;
    uint4 eight;
    if (key >= context) {
      const Bits* from = fresh.at<const Bits>(p.batch.first_row(b) + key - context, head) + d;
      eight = fresh_whole ? *reinterpret_cast<const uint4*>(from) : load_elements(from, 1);
    } else if (way == Way::rows) {
      eight = *reinterpret_cast<const uint4*>(row(key) + source.column(d));
    } else if (way == Way::columns) {
      eight = *reinterpret_cast<const uint4*>(&tile[key - first][d]);
    } else {
      Bits e[kVector];
      for (int j = 0; j < kVector; ++j) e[j] = row(key)[source.column(d + j)];
      eight = load_elements(e, 1);
    }
    *reinterpret_cast<uint4*>(place(key) + d) = eight;
  }
}

std::int64_t bytes_of_key(const AttendParams& p) {
  return std::int64_t{2} * p.kv_heads * p.dim * static_cast<std::int64_t>(sizeof(Bits));
}

std::size_t table_bytes(const AttendParams& p) {
  return (static_cast<std::size_t>(p.batch.size) * sizeof(std::int64_t) + 255) / 256 * 256;
}

}  // namespace

std::size_t gather_room(const AttendParams& bounds) {
  AttendParams contiguous = bounds;
  contiguous.pages = {};
  contiguous.k = contiguous.v = {};
  contiguous.q = {};
  contiguous.shard = Shard::contiguous(0, 0, 1);
  if (bounds.max_kv_len == 0 || !may_hold(bounds, Lengths::only_long) || !sm90::accepts(contiguous))
    return 0;
  const std::size_t keys =
      static_cast<std::size_t>((bounds.max_kv_len + kKeys - 1) / kKeys * kKeys);
  const std::size_t bytes = keys * static_cast<std::size_t>(bounds.batch.size) *
                            static_cast<std::size_t>(bytes_of_key(bounds));
  return bytes > kMostRoom ? 0 : bytes + table_bytes(bounds);
}

std::int64_t gather_capacity(const AttendParams& p, std::size_t room_bytes) {
  if (room_bytes <= table_bytes(p)) return 0;
  return static_cast<std::int64_t>(room_bytes - table_bytes(p)) / (p.batch.size * bytes_of_key(p));
}

AttendParams gather_keys(const GatheredParams& g, cudaStream_t stream) {
  AttendParams p = g.attend;
  Call call{p, {g.new_k, g.new_v}, {}, gather_capacity(p, g.room_bytes), nullptr};
  const std::int64_t half = p.batch.size * call.capacity * bytes_of_key(p) / 2;
  call.to[0] = reinterpret_cast<Bits*>(g.room);
  call.to[1] = reinterpret_cast<Bits*>(g.room + half);
  call.key_start = reinterpret_cast<std::int64_t*>(g.room + 2 * half);
  const dim3 grid(static_cast<unsigned>((call.capacity + kKeys - 1) / kKeys),
                  static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(2 * p.batch.size));
  gather_kernel<<<grid, kThreads, 0, stream>>>(call);
  LONGSPAN_CUDA(cudaGetLastError());

  const std::int64_t row = std::int64_t{p.kv_heads} * p.dim;
  p.k = KvRows(call.to[0], row, p.dim);
  p.v = KvRows(call.to[1], row, p.dim);
  p.pages = {};
  p.batch.key_start = call.key_start;
  return p;
}

}  // namespace longspan::kernels::cuda
