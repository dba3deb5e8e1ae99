#include "ebb/runtime/comm/rendezvous/build.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/shared/layout.h"

namespace ebb {
namespace {

// FNV-1a of all that says where in shared memory something lies.
constexpr uint64_t LayoutNumber() {
  const uint64_t numbers[] = {sizeof(void*),
                              sizeof(shared::WorldHeader),
                              sizeof(shared::RankPlace),
                              sizeof(shared::GroupHeader),
                              sizeof(shared::GroupSeat),
                              sizeof(SharedStatus),
                              sizeof(shared::Point),
                              sizeof(CallSummary),
                              shared::kSlots,
                              shared::kSlotBytes,
                              shared::kWaitPoints};
  uint64_t hash = 14695981039346656037u;
  for (const uint64_t number : numbers) hash = (hash ^ number) * 1099511628211u;
  return hash;
}

}  // namespace

std::string ThisBuild() {
  return absl::StrCat("Ebb ", EBB_VERSION, " (shared memory ", absl::Hex(LayoutNumber()), ")");
}

}  // namespace ebb
