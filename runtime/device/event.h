// A point in a stream that others can wait for. Move-only. An event may be recorded any number of
// times; an event that was never recorded counts as passed.
#pragma once

#include <memory>

namespace ebb {

class EventBackend;

class Event {
 public:
  explicit Event(std::unique_ptr<EventBackend> backend);
  Event(Event&&) noexcept;
  Event& operator=(Event&&) noexcept;
  ~Event();

  // Blocks the caller until the most recent Record, as of this call, has passed.
  void Wait() const;
  // Whether that Record has passed, without blocking.
  bool Passed() const;

  EventBackend& backend() const { return *backend_; }

 private:
  std::unique_ptr<EventBackend> backend_;
};

}  // namespace ebb
