// The runtime's log: one spdlog logger named "ebb", to standard error. EBB_LOG_LEVEL (trace ...
// off) sets its level; default info.
#pragma once

#include <functional>
#include <string_view>

namespace ebb {

void LogInfo(std::string_view message);
void LogWarning(std::string_view message);

// For a program with a log of its own: from now on each line goes to `sink` instead of standard
// error, on the thread that logs it, one line at a time. `sink` must not log. EBB_LOG_LEVEL still
// selects the lines. Empty: standard error, as at the start.
enum class LogLevel { kInfo, kWarning };
void SendLogTo(std::function<void(LogLevel level, std::string_view message)> sink);

// For a program that keeps a line of its own on the terminal: from now on `surround` runs for each
// logged line, on the thread that logs it, one line at a time. It calls `write`, which writes the
// line, and must not log. Empty: lines are written at once, as at the start.
void SurroundLogLines(std::function<void(const std::function<void()>& write)> surround);

}  // namespace ebb
