// Checks what a caller gives a Reshard, and views its caches as kernels see them.
#pragma once

#include "comm/control/agreement.hpp"
#include "kernels/move_keys.hpp"
#include "longspan/reshard.hpp"

namespace longspan {

/// Gives what ranks must give alike.
NamedValues describe(const ReshardOptions& options);

/// Throws UsageError or Unsupported for options that make no sense on so many ranks. The number of
/// ranks of each side is given, not 0.
void check_options(const ReshardOptions& options, int ranks);

/// Views the part of a cache of a rank that holds keys[b] keys of sequence b. Where it is
/// `written`, no two keys may go to one place. `starts` are the keys ahead of each sequence, on the
/// device; `side` is the name in errors. InputError for what does not fit.
kernels::KeyStore view_cache(const CacheTensors& cache, const ReshardOptions& options,
                             const std::vector<std::int64_t>& keys, const std::int64_t* starts,
                             Device device, bool written, const char* side);

}  // namespace longspan
