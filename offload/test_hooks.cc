#include "ebb/offload/test_hooks.h"

namespace ebb {

OffloadTestHooks& GetOffloadTestHooks() {
  static OffloadTestHooks hooks;
  return hooks;
}

}  // namespace ebb
