// Tensor maps and the copies of TMA, in the simulator.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "kernels/simulated/thread.hpp"

/// Replaces the driver's cuTensorMapEncodeTiled: the same signature and the same checks; the map
/// holds a record of the simulator's own.
extern "C" CUresult simulated_encode_tiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
    const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

namespace longspan::simulated {

/// cp.async.bulk.tensor: the map's box at `place`, innermost first, to shared address `to`.
void load_box(std::uint32_t to, const CUtensorMap* map, std::span<const int> place, void* barrier,
              Site site);

}  // namespace longspan::simulated
