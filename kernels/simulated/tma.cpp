// Tensor maps and the copies of TMA. Sources: the driver's description of cuTensorMapEncodeTiled in
// cuda.h, for what it refuses; the PTX manual's chapter on tensors, for the definition of a box and
// the permutation of rows.
#include "kernels/simulated/tma.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace longspan::simulated {
namespace {

constexpr int kMostDimensions = 5;

/// The simulator's contents of a CUtensorMap.
struct Map {
  std::uint64_t mark;
  const std::byte* data;
  std::uint64_t strides[kMostDimensions - 1];  // in bytes, of all dimensions but the first
  std::uint32_t last[kMostDimensions];         // extent - 1
  std::uint16_t box[kMostDimensions];
  std::uint8_t rank, element_bytes;
  std::uint8_t swizzle_mask;  // of the address bits that are permuted
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap) && std::is_trivially_copyable_v<Map>);

constexpr std::uint64_t kMark = 0x6c6f6e677370616e;

int bytes_of(CUtensorMapDataType type) {  // 0: a type that is not known here
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    default:
      return 0;
  }
}

/// Bytes in which rows are permuted; 0: not at all, -1: not known here.
int span_of(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
      return 0;
    case CU_TENSOR_MAP_SWIZZLE_32B:
      return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      return 128;
    default:
      return -1;
  }
}

/// A box in flight: rows of the innermost dimension, one after another.
class Box {
 public:
  Box(const Map& map, std::span<const int> place, std::uint32_t address, std::byte* to)
      : map_(map), address_(address), to_(to) {
    std::copy(place.begin(), place.end(), place_);
  }

  void land() const {
    engine_writes(to_, static_cast<std::size_t>(bytes(map_)));
    const int width = map_.box[0] * map_.element_bytes;
    int index[kMostDimensions] = {};
    for (std::uint32_t at = 0; at < static_cast<std::uint32_t>(bytes(map_));
         at += static_cast<std::uint32_t>(width)) {
      land_row(at, width, row(index));
      for (int d = 1; d < map_.rank && ++index[d] == map_.box[d]; ++d) index[d] = 0;
    }
  }

  static int bytes(const Map& map) {
    int bytes = map.element_bytes;
    for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
    return bytes;
  }

 private:
  /// The address of the row's element 0 in the tensor; null: outside of it.
  const std::byte* row(const int (&index)[kMostDimensions]) const {
    const std::byte* row = map_.data;
    for (int d = 1; d < map_.rank; ++d) {
      const std::int64_t at = std::int64_t{place_[d]} + index[d];
      if (at < 0 || at > map_.last[d]) return nullptr;
      row += static_cast<std::uint64_t>(at) * map_.strides[d - 1];
    }
    return row;
  }
  void land_row(std::uint32_t at, int width, const std::byte* row) const {
    constexpr int kMostBytes = 256 * 4;
    std::byte bytes[kMostBytes] = {};
    const std::int64_t first = place_[0], end = std::int64_t{map_.last[0]} + 1;
    const std::int64_t begin = std::clamp<std::int64_t>(-first, 0, map_.box[0]);
    const std::int64_t some = std::clamp<std::int64_t>(end - first, begin, map_.box[0]) - begin;
    if (row != nullptr && some > 0) {
      const std::size_t count = static_cast<std::size_t>(some * map_.element_bytes);
      const std::byte* const from = row + (first + begin) * map_.element_bytes;
      engine_reads(from, count);
      std::memcpy(bytes + begin * map_.element_bytes, from, count);
    }
    for (int piece = 0; piece < width; piece += 16) {
      const std::uint32_t address = address_ + at + static_cast<std::uint32_t>(piece);
      const std::uint32_t permuted = address ^ (address >> 3 & map_.swizzle_mask);
      std::memcpy(to_ + (permuted - address_), bytes + piece, 16);
    }
  }

  Map map_;
  int place_[kMostDimensions] = {};
  std::uint32_t address_;
  std::byte* to_;
};

}  // namespace

void load_box(std::uint32_t to, const CUtensorMap* map, std::span<const int> place, void* barrier,
              Site site) {
  constexpr const char* kWhat = "cp.async.bulk.tensor";
  if (properties().major < 9) fail(std::string(kWhat) + " before sm_90", site);
  if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0)
    fail(std::string(kWhat) + ": a tensor map lies at a multiple of 64 bytes", site);
  Map known;
  std::memcpy(&known, map, sizeof(known));
  if (known.mark != kMark)
    fail(std::string(kWhat) + " with something that is not a tensor map", site);
  if (known.rank != place.size())
    fail(std::string(kWhat) + " at " + std::to_string(place.size()) + " coordinates of a map of " +
             std::to_string(known.rank) + " dimensions",
         site);
  const int bytes = Box::bytes(known);
  // The address determines the permutation, which repeats after eight rows of its span.
  const int align = (known.swizzle_mask + 16) * 8;
  std::byte* const pointer = shared_pointer(to, bytes, align, kWhat, site);
  const Box box(known, place, to, pointer);
  copy_by_engine(
      to, bytes, barrier, [box] { box.land(); }, site);
}

}  // namespace longspan::simulated

extern "C" CUresult simulated_encode_tiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
    const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  using namespace longspan::simulated;
  const int element_bytes = bytes_of(type), span = span_of(swizzle);
  const auto is_multiple = [](const void* pointer, std::uintptr_t of) {
    return reinterpret_cast<std::uintptr_t>(pointer) % of == 0;
  };
  // The driver (13.0) accepts a null address too: a rank without keys describes a tensor that is
  // never copied.
  if (map == nullptr || !is_multiple(map, 64) || !is_multiple(data, 16) || rank < 1 ||
      rank > kMostDimensions || extents == nullptr || box == nullptr || steps == nullptr ||
      (rank > 1 && strides == nullptr))
    return CUDA_ERROR_INVALID_VALUE;
  // The driver supports more than these, and rows narrower than their permutation; kernels use no
  // others.
  if (element_bytes == 0 || span < 0 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || promotion < CU_TENSOR_MAP_L2_PROMOTION_NONE ||
      promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B)
    return CUDA_ERROR_INVALID_VALUE;
  Map known{};
  known.mark = kMark;
  known.data = static_cast<const std::byte*>(data);
  known.rank = static_cast<std::uint8_t>(rank);
  known.element_bytes = static_cast<std::uint8_t>(element_bytes);
  known.swizzle_mask = static_cast<std::uint8_t>(span == 0 ? 0 : span - 16);
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (extents[d] < 1 || extents[d] > cuuint64_t{1} << 32 || box[d] < 1 || box[d] > 256 ||
        steps[d] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    known.last[d] = static_cast<std::uint32_t>(extents[d] - 1);
    known.box[d] = static_cast<std::uint16_t>(box[d]);
    if (d == 0) continue;
    if (strides[d - 1] % 16 != 0 || strides[d - 1] >= cuuint64_t{1} << 40)
      return CUDA_ERROR_INVALID_VALUE;
    known.strides[d - 1] = strides[d - 1];
  }
  const cuuint32_t width = box[0] * static_cast<cuuint32_t>(element_bytes);
  if (width % 16 != 0 || (span > 0 && width != static_cast<cuuint32_t>(span)))
    return CUDA_ERROR_INVALID_VALUE;
  std::memset(static_cast<void*>(map), 0, sizeof(*map));
  std::memcpy(static_cast<void*>(map), &known, sizeof(known));
  return CUDA_SUCCESS;
}
