/// \file
/// The whole public interface, except for the interop headers (mpi.hpp, nccl.hpp, cuda.hpp).
#pragma once

#include "longspan/attention.hpp"
#include "longspan/buffer.hpp"
#include "longspan/communicator.hpp"
#include "longspan/element.hpp"
#include "longspan/error.hpp"
#include "longspan/info.hpp"
#include "longspan/machine.hpp"
#include "longspan/mask.hpp"
#include "longspan/merge.hpp"
#include "longspan/options.hpp"
#include "longspan/order.hpp"
#include "longspan/reshard.hpp"
#include "longspan/serving.hpp"
#include "longspan/shard.hpp"
#include "longspan/state.hpp"
#include "longspan/storage.hpp"
#include "longspan/strategy.hpp"
#include "longspan/tensor.hpp"
#include "longspan/types.hpp"
#include "longspan/version.hpp"
