/// \file
/// What this build and this machine can do, as rows for people: `longspan info [--features |
/// --kernels]` and `longspan env`.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace longspan {

class Communicator;

/// Version, backends, instruction set, MPI, NCCL, GPUs and the links between them, and the origin
/// of the machine's constants.
std::vector<std::pair<std::string, std::string>> system_info();

/// GPUs that this process can use; 0 in a build without CUDA.
int gpu_count();

/// Host threads of this rank: `asked`; if that is 0 LONGSPAN_THREADS; otherwise its share of the
/// node's cores. Ranks share the cores that all of them may run on; a rank has to itself those that
/// only it is pinned to. It takes no more than its share of the container's quota, and at least 1.
/// Collective.
int host_threads(const Communicator& world, int asked = 0);

/// Something that attention can be asked for, and which kernels support it. Others refuse it by
/// this name.
struct FeatureInfo {
  std::string name;     ///< as in refusals and docs/reference/features.md
  std::string meaning;  ///< one line for people
  std::string by;       ///< what can ask for it: "layer" (Attention), "calls" (ServingOps), or both
  bool host;            ///< whether CPUs support it
  bool cuda;            ///< whether some CUDA kernel supports it
};

/// Every feature in the kernels' own list that a public call can ask for.
std::vector<FeatureInfo> features();

/// A family of attention kernels and the calls that it serves. If several families of a device
/// could serve a call, the first in the list does.
struct KernelInfo {
  std::string device;   ///< "host" or "cuda"
  std::string name;     ///< the name of the family
  std::string queries;  ///< queries of a sequence: "short" (up to 16), "long", "any", or a number
  std::string heads;    ///< head_dim and value_dim
  std::string takes;    ///< features that the call may use
  std::string ends;     ///< how its rows end: "result" without a merge, "result of split keys" by
                        ///< the fold of their splits, "states" for a merge
  bool arrivals;        ///< whether it may begin before all keys of other ranks have arrived
  bool new_keys;        ///< whether it also writes a call's new keys and values into the cache
};

/// Every family of kernels; per device in the order in which they are tried.
std::vector<KernelInfo> kernel_families();

/// An environment variable that longspan reads, and its value.
struct EnvironmentVariable {
  std::string name;      ///< the name of the variable
  std::string value;     ///< its value, or empty; for a secret only whether it is set
  std::string standard;  ///< the default
  std::string meaning;   ///< one line for people
};

/// Every environment variable that longspan reads.
std::vector<EnvironmentVariable> environment();

}  // namespace longspan
