#include "ebb/sharding/report/costs.h"

namespace ebb::sharding {

std::string_view Name(Resource resource) {
  constexpr std::string_view kNames[kResources] = {"device",
                                                   "device memory",
                                                   "cores",
                                                   "host memory",
                                                   "copies to the device",
                                                   "copies to the host",
                                                   "peers",
                                                   "network",
                                                   "disk reads",
                                                   "disk writes",
                                                   "disk"};
  return kNames[static_cast<size_t>(resource)];
}

}  // namespace ebb::sharding
