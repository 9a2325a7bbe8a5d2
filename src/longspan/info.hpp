/// \file
/// What this build and this machine can do, as rows for people: `longspan info [--features |
/// --kernels]` and `longspan env`.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace longspan {

class Communicator;

/// Version, backends, instruction set, MPI, NCCL, GPUs and the links between them, and where the
/// machine's constants come from.
std::vector<std::pair<std::string, std::string>> system_info();

/// GPUs that this process can use; 0 in a build without CUDA.
int gpu_count();

/// Host threads of this rank: `asked`, or where that is 0 LONGSPAN_THREADS, or else its share of
/// the node's cores: ranks share those that they may all run on, and have those to themselves that
/// they are pinned to alone; no more than its share of the container's quota; at least 1.
/// Collective.
int host_threads(const Communicator& world, int asked = 0);

/// Something that attention can be asked for, and which kernels do it. What they do not do, they
/// refuse by this name.
struct FeatureInfo {
  std::string name;     ///< as refusals and docs/reference/features.md call it
  std::string meaning;  ///< one line for people
  std::string by;  ///< what can be asked for it: "layer" (Attention), "calls" (ServingOps), or both
  bool host;       ///< whether processors do it
  bool cuda;       ///< whether some CUDA kernel does it
};

/// Every feature of the kernels' own list that a public call can ask for.
std::vector<FeatureInfo> features();

/// A family of attention kernels: which calls it serves, unless a row of the same device ahead of
/// it takes them.
struct KernelInfo {
  std::string device;   ///< "host" or "cuda"
  std::string name;     ///< of the family
  std::string queries;  ///< of a sequence: "short" (up to 16), "long", "any", or how many
  std::string heads;    ///< head_dim and value_dim
  std::string takes;    ///< what the call may ask for
  std::string ends;     ///< where its rows end: "result" without a merge, "result of split keys" by
                        ///< the fold of their splits, "states" for a merge
  bool arrivals;        ///< whether it may begin while keys of other ranks still come
  bool new_keys;        ///< whether it writes a call's new keys and values into the cache itself
};

/// Every family of kernels, of each device in the order in which they are asked.
std::vector<KernelInfo> kernel_families();

/// An environment variable that longspan reads, and what it is set to.
struct EnvironmentVariable {
  std::string name;      ///< as the shell knows it
  std::string value;     ///< as set, or empty; of a secret whether it is set
  std::string standard;  ///< what holds when it is not set
  std::string meaning;   ///< one line for people
};

/// Every environment variable that longspan reads.
std::vector<EnvironmentVariable> environment();

}  // namespace longspan
