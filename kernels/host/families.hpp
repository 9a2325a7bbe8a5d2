// The families of host kernels, in the order in which they are tried. Each attends one tile of one
// sequence at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/host/tile.hpp"
#include "kernels/kernel_family.hpp"

namespace longspan::kernels::host {

/// A tile, and the memory of the thread that attends it.
struct TileWork {
  const Tile& tile;
  const PackedSegments& packed;
  std::byte* space;
  int rows, levels;  // capacity of the space
};

/// The states of a tile's rows, in that memory.
struct TileStates {
  const Stats* stats;  // [rows]
  const float* o;      // [rows, padded value_dim]
};

/// The host's arguments of KernelFamily.
struct OnHost {
  enum class Id : std::uint8_t { amx, vectors };
  using Asked = int;  // the sequence of the batch
  /// The most rows of a tile, and a thread's space, for calls within limits.
  struct Room {
    int rows = 0;
    std::size_t bytes = 0;
  };
  using Attend = TileStates (*)(const AttendParams&, const TileWork&);
};
using HostFamily = KernelFamily<OnHost>;
inline constexpr int kFamilies = 2;

std::span<const HostFamily, kFamilies> families();

/// Returns the family that serves the rows of sequence b.
const HostFamily& serving(const AttendParams& p, int b);

}  // namespace longspan::kernels::host
