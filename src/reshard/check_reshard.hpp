// Checks the arguments of a Reshard, and views its caches as kernels take them.
#pragma once

#include "comm/control/agreement.hpp"
#include "kernels/move_keys.hpp"
#include "longspan/reshard.hpp"

namespace longspan {

/// Lists the options that ranks must give alike.
NamedValues describe(const ReshardOptions& options);

/// Throws UsageError or Unsupported for options that make no sense on `ranks` ranks. Each side's
/// number of ranks is resolved, not 0.
void check_options(const ReshardOptions& options, int ranks);

/// Views a rank's part of a cache, with keys[b] keys of sequence b. If it is `written`, no two keys
/// may go to one place. `starts` are the numbers of keys before each sequence, on the device;
/// `side` is the name in errors. InputError for what does not fit.
kernels::KeyStore view_cache(const CacheTensors& cache, const ReshardOptions& options,
                             const std::vector<std::int64_t>& keys, const std::int64_t* starts,
                             Device device, bool written, const char* side);

}  // namespace longspan
