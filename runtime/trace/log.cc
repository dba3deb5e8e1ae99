#include "ebb/runtime/trace/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace ebb {
namespace {

// Where the program sends log lines.
struct Output {
  std::mutex mutex;
  std::function<void(LogLevel, std::string_view)> sink;
  std::function<void(const std::function<void()>&)> surround;
};

// Never destroyed, like the logger, because threads may log while the process exits.
Output& TheOutput() {
  static Output& output = *new Output;
  return output;
}

void Log(spdlog::logger& logger, spdlog::level::level_enum level, std::string_view message) {
  if (!logger.should_log(level)) return;
  const auto write = [&] {
    logger.log(level, spdlog::string_view_t(message.data(), message.size()));
  };
  Output& output = TheOutput();
  const std::lock_guard lock(output.mutex);
  if (output.sink) {
    return output.sink(level == spdlog::level::warn ? LogLevel::kWarning : LogLevel::kInfo,
                       message);
  }
  output.surround ? output.surround(write) : write();
}

spdlog::logger* MakeLogger() {
  auto* logger = new spdlog::logger("ebb", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %n %^%l%$: %v");
  logger->set_level(spdlog::level::info);
  const char* name = std::getenv("EBB_LOG_LEVEL");
  if (name == nullptr || *name == '\0') return logger;
  // spdlog reads every name it does not know as "off", which would silence a misspelt "debug".
  const spdlog::level::level_enum level = spdlog::level::from_str(name);
  if (level == spdlog::level::off && std::string_view(name) != "off") {
    Log(*logger, spdlog::level::warn,
        "EBB_LOG_LEVEL=" + std::string(name) +
            " is not a level; using info (levels: trace, debug, info, warning, error, critical, "
            "off)");
  } else {
    logger->set_level(level);
  }
  return logger;
}

spdlog::logger& Logger() {
  static spdlog::logger& logger = *MakeLogger();
  return logger;
}

}  // namespace

void LogInfo(std::string_view message) {
  Log(Logger(), spdlog::level::info, message);
}
void LogWarning(std::string_view message) {
  Log(Logger(), spdlog::level::warn, message);
}

void SendLogTo(std::function<void(LogLevel, std::string_view)> sink) {
  const std::lock_guard lock(TheOutput().mutex);
  TheOutput().sink = std::move(sink);
}

void SurroundLogLines(std::function<void(const std::function<void()>&)> surround) {
  const std::lock_guard lock(TheOutput().mutex);
  TheOutput().surround = std::move(surround);
}

}  // namespace ebb
