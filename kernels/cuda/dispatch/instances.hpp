// Lists every instance of the attention kernels with the shared memory of its blocks, and chooses
// the instance if a block may have less. A GPU of compute capability 8.0 gives a block 163 KB, 9.0
// and 10.0 give 227 KB, 8.6, 8.9 and 12.0 only 99 KB, which the faster instances for head dims
// above 128 do not fit.
//
// The figures are here so that they can be read without a GPU and without nvcc. Where an instance
// is made, its traits are compared with them: a build with another figure does not compile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longspan/limits.hpp"

namespace longspan::kernels::cuda {

/// The way in which an instance reads keys, values and queries.
enum class Loader : std::uint8_t {
  plain,  // contiguous dense rows of the products' type, in whole 16 bytes that are aligned, no
          // bias, no scales
  any16,  // the other layouts, with keys and values of the products' type: pages, x-packed, any
          // strides
  any8,   // all others: fp8 keys and values
};

enum class Family : std::uint8_t {
  decode,
  portable,
  fp32,
  tf32,
  hopper,
  hopper_e4m3,
  hopper_in_order,
  mla,
  mla_in_order
};

constexpr const char* name(Family family) {
  constexpr const char* names[] = {
      "decode",      "portable",        "fp32", "tf32",        "hopper",
      "hopper e4m3", "hopper in order", "mla",  "mla in order"};
  return names[static_cast<int>(family)];
}

constexpr bool is_of_hopper(Family family) {
  return family == Family::hopper || family == Family::hopper_e4m3 ||
         family == Family::hopper_in_order;
}

constexpr bool is_of_mla(Family family) {
  return family == Family::mla || family == Family::mla_in_order;
}

struct Instance {
  Family family;
  Loader loader;
  int dim;  // the instance serves every head_dim up to it
  int value_dim;
  int rows;   // packed rows of a tile
  int bytes;  // of a block's dynamic shared memory; it has no other
};

/// They ascend in value_dim, then dim, then rows. For fp32 and tf32 `any16` stands for everything
/// that is not plain. For hopper the bytes are those with ALiBi, which needs the most, and `any16`
/// is also for pages and biases. For mla it stands for everything.
inline constexpr Instance kInstances[] = {
    {Family::decode, Loader::plain, 32, 32, 8, 38'704},
    {Family::decode, Loader::plain, 32, 32, 16, 42'928},
    {Family::decode, Loader::plain, 32, 32, 32, 51'376},
    {Family::decode, Loader::plain, 64, 64, 8, 73'008},
    {Family::decode, Loader::plain, 64, 64, 16, 78'768},
    {Family::decode, Loader::plain, 64, 64, 32, 73'888},
    {Family::decode, Loader::plain, 96, 96, 8, 70'464},
    {Family::decode, Loader::plain, 96, 96, 16, 77'760},
    {Family::decode, Loader::plain, 96, 96, 32, 80'048},
    {Family::decode, Loader::plain, 128, 128, 8, 76'080},
    {Family::decode, Loader::plain, 128, 128, 16, 84'912},
    {Family::decode, Loader::plain, 128, 128, 32, 77'280},
    {Family::decode, Loader::plain, 192, 192, 8, 87'328},
    {Family::decode, Loader::plain, 192, 192, 32, 110'048},
    {Family::decode, Loader::plain, 256, 256, 8, 82'192},
    {Family::decode, Loader::plain, 256, 256, 32, 110'032},
    {Family::decode, Loader::any16, 64, 64, 8, 77'184},
    {Family::decode, Loader::any16, 64, 64, 16, 83'328},
    {Family::decode, Loader::any16, 64, 64, 32, 79'216},
    {Family::decode, Loader::any16, 128, 128, 8, 80'256},
    {Family::decode, Loader::any16, 128, 128, 16, 89'472},
    {Family::decode, Loader::any16, 128, 128, 32, 82'112},
    {Family::decode, Loader::any16, 256, 256, 8, 86'368},
    {Family::decode, Loader::any16, 256, 256, 32, 114'864},
    {Family::decode, Loader::any8, 64, 64, 8, 44'480},
    {Family::decode, Loader::any8, 64, 64, 16, 50'720},
    {Family::decode, Loader::any8, 64, 64, 32, 63'200},
    {Family::decode, Loader::any8, 128, 128, 8, 80'320},
    {Family::decode, Loader::any8, 128, 128, 16, 89'632},
    {Family::decode, Loader::any8, 128, 128, 32, 82'352},
    {Family::decode, Loader::any8, 256, 256, 8, 86'464},
    {Family::decode, Loader::any8, 256, 256, 32, 98'736},
    {Family::portable, Loader::plain, 32, 32, 128, 27'136},
    {Family::portable, Loader::plain, 64, 64, 128, 51'712},
    {Family::portable, Loader::plain, 96, 96, 128, 76'288},
    {Family::portable, Loader::plain, 128, 128, 128, 100'864},
    {Family::portable, Loader::plain, 192, 192, 128, 150'016},
    {Family::portable, Loader::plain, 256, 256, 128, 133'632},
    {Family::portable, Loader::any16, 64, 64, 128, 52'224},
    {Family::portable, Loader::any16, 128, 128, 128, 101'376},
    {Family::portable, Loader::any16, 256, 256, 128, 134'144},
    {Family::portable, Loader::any8, 64, 64, 128, 52'224},
    {Family::portable, Loader::any8, 128, 128, 128, 101'376},
    {Family::portable, Loader::any8, 256, 256, 128, 134'144},
    {Family::fp32, Loader::plain, 64, 64, 32, 44'560},
    {Family::fp32, Loader::plain, 128, 128, 32, 52'752},
    {Family::fp32, Loader::plain, 256, 256, 32, 83'472},
    {Family::fp32, Loader::any16, 64, 64, 32, 44'560},
    {Family::fp32, Loader::any16, 128, 128, 32, 52'752},
    {Family::fp32, Loader::any16, 256, 256, 32, 83'472},
    {Family::fp32, Loader::any16, kMaxHeadDim, kMaxValueDim, 16, 78'608},
    {Family::tf32, Loader::any16, 64, 64, 64, 53'776},
    {Family::tf32, Loader::any16, 128, 128, 64, 70'160},
    {Family::tf32, Loader::any16, 256, 256, 64, 134'672},
    {Family::hopper, Loader::any16, 64, 64, 192, 95'232},
    {Family::hopper, Loader::any16, 128, 64, 192, 152'576},
    {Family::hopper, Loader::any16, 80, 80, 192, 168'960},
    {Family::hopper, Loader::any16, 96, 96, 128, 200'704},
    {Family::hopper, Loader::any16, 128, 128, 128, 200'704},
    {Family::hopper, Loader::any16, 192, 128, 128, 217'088},
    {Family::hopper, Loader::any16, 192, 192, 128, 225'280},
    {Family::hopper, Loader::any16, 256, 256, 128, 232'448},
    {Family::hopper_e4m3, Loader::any8, 64, 64, 192, 128'000},
    {Family::hopper_e4m3, Loader::any8, 128, 128, 128, 163'840},
    {Family::hopper_e4m3, Loader::any8, 256, 256, 128, 202'752},
    {Family::hopper_in_order, Loader::any16, 64, 64, 128, 117'760},
    {Family::hopper_in_order, Loader::any16, 128, 128, 128, 232'448},
    {Family::mla, Loader::any16, 576, 512, 64, 231'424},
    {Family::mla_in_order, Loader::any16, 576, 512, 16, 193'536},
};

/// The shared memory of a block that every instance except Hopper's fits.
inline constexpr int kEnoughBytes = 163 * 1024;

/// The bytes of an instance with these traits; -1 if there is none. value_dim 0: its only one.
constexpr int bytes_of(Family family, Loader loader, int dim, int rows, int value_dim = 0) {
  for (const Instance& i : kInstances)
    if (i.family == family && i.loader == loader && i.dim == dim && i.rows == rows &&
        (value_dim == 0 || i.value_dim == value_dim))
      return i.bytes;
  return -1;
}

/// Returns the instance with the least dims that are enough, and with enough rows; if none has
/// enough, the one with the most rows.
constexpr const Instance* instance_of(Family family, Loader loader, int head_dim, int value_dim,
                                      std::int64_t rows) {
  const Instance* found = nullptr;
  for (const Instance& i : kInstances) {
    if (i.family != family || i.loader != loader || i.dim < head_dim || i.value_dim < value_dim)
      continue;
    if (found != nullptr &&
        (i.dim != found->dim || i.value_dim != found->value_dim || found->rows >= rows))
      break;
    found = &i;
  }
  return found;
}

/// Returns the instance on a GPU whose blocks may have `block_bytes` of shared memory, or null if
/// none fits. If that is too little for the first choice of decode, the instance with the fewest
/// rows serves, and sequences of more rows go through it in turns. For plain rows of fp32 the
/// instance for any rows then serves. Other families have no second choice: the next one in the
/// table serves (families.hpp).
constexpr const Instance* fitting_instance(Family family, Loader loader, int head_dim,
                                           int value_dim, std::int64_t rows, int block_bytes) {
  const auto fits = [&](const Instance* i) { return i != nullptr && i->bytes <= block_bytes; };
  const Instance* found = instance_of(family, loader, head_dim, value_dim, rows);
  if (fits(found)) return found;
  if (family == Family::decode) found = instance_of(family, loader, head_dim, value_dim, 1);
  if (family == Family::fp32) found = instance_of(family, Loader::any16, head_dim, value_dim, rows);
  return fits(found) ? found : nullptr;
}

/// The widest head for which the family has an instance.
constexpr int widest(Family family) {
  int most = 0;
  for (const Instance& i : kInstances)
    if (i.family == family && i.dim > most) most = i.dim;
  return most;
}

}  // namespace longspan::kernels::cuda
