// The head dims that kernels are instantiated for. Any other uses the next larger instance; its
// missing columns are zeros in shared memory and are not stored.
#pragma once

#include <type_traits>

namespace longspan::kernels::cuda {

/// Calls use(std::integral_constant<int, instance>) with the smallest instance >= dim.
template <class Use>
auto for_dim(int dim, const Use& use) {
  if (dim <= 32) return use(std::integral_constant<int, 32>{});
  if (dim <= 64) return use(std::integral_constant<int, 64>{});
  if (dim <= 96) return use(std::integral_constant<int, 96>{});
  if (dim <= 128) return use(std::integral_constant<int, 128>{});
  if (dim <= 192) return use(std::integral_constant<int, 192>{});
  return use(std::integral_constant<int, 256>{});
}

/// The same with fewer instances, for the loaders that support every layout: they are the largest
/// kernels by far.
template <class Use>
auto for_general_dim(int dim, const Use& use) {
  if (dim <= 64) return use(std::integral_constant<int, 64>{});
  if (dim <= 128) return use(std::integral_constant<int, 128>{});
  return use(std::integral_constant<int, 256>{});
}

}  // namespace longspan::kernels::cuda
