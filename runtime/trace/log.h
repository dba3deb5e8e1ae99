// The runtime's log: one spdlog logger named "ebb", to standard error. EBB_LOG_LEVEL (trace ...
// off) sets its level; default info.
#pragma once

#include <string_view>

namespace ebb {

void LogInfo(std::string_view message);
void LogWarning(std::string_view message);

}  // namespace ebb
