// Lengths, starts, tables and flags in the width that the library reads: int32 lengths and tables,
// int64 positions, flags of one byte. Frameworks make int64 by default.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "longspan/tensor.hpp"
#include "longspan/types.hpp"

namespace longspan::python {

namespace nb = nanobind;

/// "cache_seqlens has 4294967296; -2^31 to 2^31 - 1 are possible".
std::string past_range(const char* name, std::int64_t value);

/// Throws InputError where elements of t cannot become `wanted`: int32, int64, or uint8 for flags.
void check_integers(const Tensor& t, DType wanted, const char* name);

/// The elements of t, which lies on the host, row after row. A flag is 1 for a number that is not
/// 0. InputError for an element past the range of `wanted`.
nb::bytes as_integers(const Tensor& t, DType wanted, const char* name);

/// The same for a tensor of torch on a GPU: queued on the stream and not waited for. An element
/// past the range becomes the end of the range, an invalid length too, without an error here.
nb::object torch_integers(nb::handle tensor, DType wanted, int gpu, Stream stream);

}  // namespace longspan::python
