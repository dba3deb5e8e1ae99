#include "ebb/runtime/trace/ledger.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/runtime/trace/timeline.h"

int main() {
  ebb::LogInfo("linked");
  ebb::Timeline timeline({.name = "linked"});
  timeline.AddTrack("compute");
  ebb::MemoryLedger ledger;
  return ledger.Rows().empty() ? 0 : 1;
}
