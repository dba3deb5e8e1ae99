// Objects with a thread each that no other thread waits for any more. Each is destroyed, which
// joins its thread, once it has ended. The process's end does not wait for the others.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

namespace ebb {

template <class T>
class Kept {
 public:
  static void Add(std::shared_ptr<T> object) {
    Kept& kept = The();
    const std::scoped_lock lock(kept.mutex_);
    kept.SetAsideInherited();
    kept.objects_.push_back(std::move(object));
  }
  static void RemoveEnded() {
    std::list<std::shared_ptr<T>> ended;
    Kept& kept = The();
    const std::scoped_lock lock(kept.mutex_);
    kept.SetAsideInherited();
    for (auto object = kept.objects_.begin(); object != kept.objects_.end();) {
      const auto next = std::next(object);
      if ((*object)->has_ended()) ended.splice(ended.end(), kept.objects_, object);
      object = next;
    }
  }

 private:
  // Never destroyed, because threads that go on use what is in it.
  static Kept& The() {
    static Kept& kept = []() -> Kept& {
      std::atexit(&RemoveEnded);
      return *new Kept;
    }();
    return kept;
  }

  // A forked process has its parent's objects without their threads, and cannot join these.
  void SetAsideInherited() {
    if (std::exchange(process_, getpid()) != getpid())
      inherited_.splice(inherited_.end(), objects_);
  }

  std::mutex mutex_;
  pid_t process_ = getpid();
  std::list<std::shared_ptr<T>> objects_, inherited_;
};

}  // namespace ebb
