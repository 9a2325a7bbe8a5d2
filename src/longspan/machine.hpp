/// \file
/// The speed of a machine in a few constants, from which the time of a run is predicted. `longspan
/// calibrate` measures and saves them; "auto" uses them to choose a strategy.
#pragma once

#include <string>

#include "longspan/types.hpp"

namespace longspan {

class Communicator;

/// The constants of one rank while all other ranks are equally busy.
struct Machine {
  Device device = Device::host;  ///< where ranks compute
  std::string name;              ///< of the constants: "built in", or the file that they come from
  std::string measured;          ///< when, and how evenly, if the file has it
  double flops_per_s = 0;        ///< of attention with many query rows
  double key_bytes_per_s = 0;    ///< of keys and values, read for few query rows
  double merge_bytes_per_s = 0;  ///< of states that are folded
  double copy_bytes_per_s = 0;   ///< of rows that are packed, or reordered
  double call_s = 0;             ///< one more call of attention
  double latency_s = 0;          ///< one transfer between ranks of a node, however small
  double peer_latency_s =
      0;  ///< the same on GPUs that write each other's buffers, which need no NCCL
  double link_bytes_per_s = 0;       ///< received from ranks of the same node
  double node_latency_s = 0;         ///< one transfer between nodes, however small
  double node_link_bytes_per_s = 0;  ///< received from other nodes
  double overlap = 0;  ///< 0 to 1: the part of a transfer that does not slow down the computation
                       ///< beside it
};

/// Default constants for one rank of a device: an H200 with NVLink and 400 Gbit/s between nodes, or
/// one core whose ranks share memory.
Machine built_in_machine(Device device);

/// The constants of this machine: from the file that LONGSPAN_MACHINE names, else from
/// machine_file(device) if it exists, else the built-in ones. Throws UsageError as machine_in does,
/// also if LONGSPAN_MACHINE names a file that does not exist.
Machine machine_here(Device device);

/// The constants in a file. Throws UsageError if it cannot be read, is not an ordinary file (a
/// folder, a FIFO, a device), or has more than 64 KiB; and as machine_from does.
Machine machine_in(const std::string& path, Device device);

/// The same constants on every rank: those of rank 0's machine. Collective; what machine_here
/// throws there is thrown on all.
Machine shared_machine(const Communicator& world);

/// The file that `longspan calibrate` writes: the one that LONGSPAN_MACHINE names, or else
/// longspan/host.machine or longspan/cuda.machine in the user's configuration folder. Empty if
/// neither is known.
std::string machine_file(Device device);

/// The origin of the constants, for people: the name, and what is known of the measurement.
std::string origin_of(const Machine& machine);

/// One line for each constant, its name and its value, as machine_from reads it. If it is known
/// when they were measured, a comment before them tells it.
std::string to_text(const Machine& machine);

/// Reads the text that to_text wrote; it skips other lines that begin with #. Throws UsageError,
/// which names `origin`, for an unknown name, a missing constant, and a value out of bounds: rates
/// are 1 to 1e30 per second, times 1e-15 to 1e6 seconds, overlap 0 to 1.
Machine machine_from(const std::string& text, const std::string& origin, Device device);

}  // namespace longspan
