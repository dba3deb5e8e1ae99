// The cost of operations on a machine: amounts of resources, which operations that run at the
// same time share. Fixed durations would be wrong, because streams share cores, and reads share a
// disk with writes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "ebb/sharding/op_list.h"

namespace ebb::sharding {

// The resources of one rank. A resource that ranks of a host share counts in parts.
enum class Resource : uint8_t {
  kDevice,        // seconds of the device's arithmetic
  kDeviceMemory,  // bytes read and written
  kCores,         // seconds of a core
  kHostMemory,    // bytes read and written
  kToDevice,      // bytes from host memory to the device
  kToHost,        // bytes from the device to host memory
  kPeers,         // bytes from other devices of the host
  kNetwork,       // bytes from other hosts
  kDiskRead,      // bytes
  kDiskWrite,     // bytes
  kDisk,          // bytes either way
};
inline constexpr int kResources = 11;
std::string_view Name(Resource resource);

// By resource: amounts, or amounts a second.
class Amounts {
 public:
  double& operator[](Resource resource) { return of_[static_cast<size_t>(resource)]; }
  double operator[](Resource resource) const { return of_[static_cast<size_t>(resource)]; }

 private:
  std::array<double, kResources> of_ = {};
};

struct Cost {
  double caller_seconds = 0;  // of the thread that calls, to issue it
  double latency = 0;         // seconds before it uses anything; of transfers these overlap
  // Afterwards an operation uses its amounts. Alone it runs as long as the slowest resource
  // takes, but at least `seconds`, because one thread or transfer cannot use all of some resources.
  double seconds = 0;
  Amounts amounts = {};
};

class Costs {
 public:
  virtual ~Costs() = default;
  virtual Cost Of(const Op& op) const = 0;
  virtual Amounts rates() const = 0;  // a second
  // The compute stream is the thread that calls, as on the CPU: it issues nothing while kernels
  // run.
  virtual bool caller_computes() const = 0;
  // The caller asks for each step's report before it begins the next one.
  virtual bool caller_awaits_report() const = 0;
};

// The speeds of tasks that share a machine's resources. All slow down alike until a resource is
// full. Tasks that use it keep that speed, and the rest of the other resources goes to the other
// tasks (max-min fairness).
//
//   a disk that reads 1.0 and writes 1.0, together 1.75, with two readers and one writer:
//     reader  |#####     | 0.5
//     reader  |#####     | 0.5
//     writer  |#######   | 0.75
using Limit = int;  // the resource that limits a speed, or none
inline constexpr Limit kNoLimit = kResources;

struct RunningShare {
  Amounts demand = {};  // amounts a second at full speed, none above its rate
  double speed = 0;     // of that: above 0, at most 1
  Limit limit = kNoLimit;
};

// Fills in speeds and limits. Every resource with a demand has a rate above 0.
void ShareRates(const Amounts& rates, std::span<RunningShare> running);

}  // namespace ebb::sharding
