#include "ebb/runtime/config/config.h"

int main() {
  return ebb::Config::FromJson("{}").ok() ? 0 : 1;
}
