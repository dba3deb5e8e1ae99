#include "ebb/runtime/comm/rendezvous/departures.h"

#include <utility>

#include "ebb/runtime/comm/rendezvous/connection.h"

namespace ebb {

std::string Departures::Leave(const std::string& name, int size, const Departure& mine) {
  Note(name, size, mine);
  return Packer().Add(name).Add(static_cast<uint64_t>(size)).Add(mine.rank).Add(mine.calls).Take();
}

void Departures::Hear(std::string_view text) {
  Unpacker unpacker(text);
  const std::string name = unpacker.Text();
  const int size = static_cast<int>(unpacker.Number());
  Departure departure;
  departure.rank = unpacker.Text();
  departure.calls = unpacker.Number();
  if (unpacker.ok()) Note(name, size, std::move(departure));
}

std::optional<Departure> Departures::First(const std::string& name) {
  const std::scoped_lock lock(mutex_);
  const auto found = left_.find(name);
  if (found == left_.end()) return std::nullopt;
  return found->second.first;
}

size_t Departures::known() {
  const std::scoped_lock lock(mutex_);
  return left_.size();
}

void Departures::Note(const std::string& name, int size, Departure departure) {
  const std::scoped_lock lock(mutex_);
  Left& left = left_[name];
  if (left.ranks++ == 0) left.first = std::move(departure);
  if (left.ranks >= size) left_.erase(name);
}

}  // namespace ebb
