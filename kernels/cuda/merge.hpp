// The kernels around attention, as host code sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

void merge(const MergeParams& params, cudaStream_t stream);
void map_rows(const MapParams& params, cudaStream_t stream);
void place_rows(const PlaceParams& params, cudaStream_t stream);
void key_starts(const KeyStartParams& params, cudaStream_t stream);

}  // namespace longspan::kernels::cuda
