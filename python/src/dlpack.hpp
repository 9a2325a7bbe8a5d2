// The part of DLPack 1.x that is read here, and of its exchange interface in C
// (`type(t).__dlpack_c_exchange_api__`). By that PyTorch 2.10 and newer describe a tensor within
// tens of nanoseconds. The names and the order of the fields are the specification's.
#pragma once

#include <cstdint>

namespace longspan::python::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4m3fn = 10,
  kFloat8E5m2 = 12,
};

struct Place {
  std::int32_t type;
  std::int32_t index;
};

struct Type {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct View {  // DLTensor
  void* data;
  Place place;
  std::int32_t dims;
  Type type;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: dense
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major, minor;
};

struct Managed {  // DLManagedTensor
  View view;
  void* context;
  void (*deleter)(Managed*);
};

struct ManagedVersioned {  // DLManagedTensorVersioned
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags;
  View view;
};

inline constexpr std::uint64_t kReadOnly = 1;

using SetError = void (*)(void* context, const char* kind, const char* message);

struct ExchangeApi {  // DLPackExchangeAPI; a failing function sets the Python error and gives -1
  Version version;
  ExchangeApi* older;
  int (*allocate)(View* like, ManagedVersioned** made, void* context, SetError set_error);
  int (*managed_of)(void* object, ManagedVersioned** made);
  int (*object_of)(ManagedVersioned* managed, void** object);
  int (*view_of)(void* object, View* view);  // what it points to lives as long as `object`
  int (*current_stream)(std::int32_t device_type, std::int32_t index, void** stream);
};

}  // namespace longspan::python::dlpack
