// The tile configurations of the Hopper kernel. A configuration defines how many query rows and
// keys a block multiplies at a time; Tile derives from it how shared memory and registers are
// divided.
#pragma once

#include <type_traits>

#include "kernels/cuda/arch/sm90.cuh"

namespace longspan::kernels::sm90 {

/// What an instance can do with a product: only scale it; cap it; or what the call asks for, which
/// is ALiBi with or without a cap.
enum class ScoreKind { plain, softcap, any };

/// The part of a configuration that is chosen by measurements for each head dimension.
struct TileShape {
  int dim;              // the largest head_dim; a multiple of 16, for e4m3 of 32
  int value_dim = dim;  // the largest value_dim, likewise
  int consumers;        // warpgroups of 64 query rows each
  int keys;             // of a tile of K or V
  bool ping_pong;  // consumers take turns at the tensor cores instead of finding their own rhythm
};

/// docs/notes/hopper-prefill.md has the measurements of each choice.
inline constexpr TileShape kDim64{.dim = 64, .consumers = 3, .keys = 128, .ping_pong = true};
inline constexpr TileShape kDim80{.dim = 80, .consumers = 3, .keys = 112, .ping_pong = true};
inline constexpr TileShape kDim96{.dim = 96, .consumers = 2, .keys = 160, .ping_pong = false};
inline constexpr TileShape kDim128To64{
    .dim = 128, .value_dim = 64, .consumers = 3, .keys = 128, .ping_pong = true};
inline constexpr TileShape kDim128{.dim = 128, .consumers = 2, .keys = 160, .ping_pong = false};
inline constexpr TileShape kDim192To128{
    .dim = 192, .value_dim = 128, .consumers = 2, .keys = 128, .ping_pong = false};
inline constexpr TileShape kDim192{.dim = 192, .consumers = 2, .keys = 112, .ping_pong = false};
inline constexpr TileShape kDim256{.dim = 256, .consumers = 2, .keys = 80, .ping_pong = false};

/// The same for e4m3. Up to dim 128 a tile has more keys than O has columns.
inline constexpr TileShape kE4m3Dim64{.dim = 64, .consumers = 3, .keys = 160, .ping_pong = true};
inline constexpr TileShape kE4m3Dim128{.dim = 128, .consumers = 2, .keys = 192, .ping_pong = true};
inline constexpr TileShape kE4m3Dim256{.dim = 256, .consumers = 2, .keys = 128, .ping_pong = true};

/// The same for the fixed order, whose tiles of keys are its segments.
inline constexpr TileShape kFixedDim64{.dim = 64, .consumers = 2, .keys = 128, .ping_pong = true};
inline constexpr TileShape kFixedDim128{.dim = 128, .consumers = 2, .keys = 128, .ping_pong = true};

/// One instance of the kernel. Result is the type of a finished output.
template <class Element_, TileShape kShape, ScoreKind kScores_ = ScoreKind::plain,
          class Result_ = Element_>
struct TileTraits {
  using Element = Element_;
  using Result = Result_;
  static constexpr int kDim = kShape.dim;
  static constexpr int kValueDim = kShape.value_dim;
  static constexpr int kConsumers = kShape.consumers;
  static constexpr int kKeys = kShape.keys;
  static constexpr bool kPingPong = kShape.ping_pong;
  static constexpr ScoreKind kScores = kScores_;
  static constexpr bool kEightBits = sizeof(Element) == 1;  // attend_sm90_fp8.cuh
  static constexpr bool kFixedOrder = false;                // attend_sm90_fixed_order.cuh
  static constexpr bool kGradients = false;                 // gradients_sm90_rows.cuh

  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kStages = 2;  // of keys
  static constexpr int kValueStages = kStages;
  // A panel is as wide as the swizzle, 128 bytes.
  static constexpr int kPanelElements = 128 / static_cast<int>(sizeof(Element));
  static constexpr int panels_of(int dim) { return (dim + kPanelElements - 1) / kPanelElements; }
  static constexpr int kPanels = panels_of(kDim);
  static constexpr int kPanelBytes = kKeys * 128;
  static constexpr int kStep = 32 / static_cast<int>(sizeof(Element));  // elements of a product
  static constexpr int kThreads = 128 * (kConsumers + 1);

  // Values as the product takes them: [keys, value_dim] as loaded, or e4m3 [columns of O, keys].
  static constexpr int kColumns = kValueDim + (kEightBits ? 8 : 0);
  static constexpr int kValuePanels = kEightBits ? (kKeys + 127) / 128 : panels_of(kValueDim);
  static constexpr int kValueRows = kEightBits ? kColumns : kKeys;
  static constexpr int kTransposers = kEightBits ? 64 : 0;  // threads

  // Warps that find rows in pages need registers, of which three consumers, or two with wide rows
  // of O, leave too few.
  static constexpr bool kPages = kConsumers == 2 && kDim <= 192 && !kEightBits;

  // The exponentials' origin lies kLift below a maximum, and weights stay below 2^kSlack.
  static constexpr float kLift = kEightBits ? 8.0f : 0.0f;
  static constexpr float kSlack = kEightBits ? 8.75f : 8.0f;

  // Producer and consumer warps share the 64 Ki registers of a multiprocessor.
  static constexpr int kProducerRegisters = kPages ? 72 : kConsumers == 3 && !kEightBits ? 32 : 56;
  static constexpr int kConsumerRegisters = kPages            ? 216
                                            : kConsumers == 2 ? 224
                                            : kEightBits      ? 152
                                                              : 160;
  // A consumer that requests more registers than all warps have at the launch would wait forever.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (kConsumers + 1) * (65536 / kThreads / 8 * 8));
};

/// An instance in the fixed order. Its producer itself copies rows that TMA cannot load, and needs
/// no more registers for it.
template <class Element, TileShape kShape>
struct FixedOrderTile : TileTraits<Element, kShape> {
  using Base = TileTraits<Element, kShape>;
  static constexpr bool kFixedOrder = true;
  static constexpr bool kPages = false;  // PageProducer's
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;
  static_assert(Base::kConsumers == 2 && Base::kKeys == 128 && Base::kValueDim == Base::kDim);

  // A thread's part of a state: its elements of O in fours, and the statistics of its two rows.
  static constexpr int kQuads = Base::kValueDim / 8;
  static constexpr int kStateThreads = 128 * Base::kConsumers;
  static constexpr int kStateBytes = 16 * (kQuads + 1) * kStateThreads;  // of a block's rows
};

}  // namespace longspan::kernels::sm90
