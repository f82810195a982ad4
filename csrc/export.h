// What libqkv_core.so lets others call; all else in it is hidden.
#pragma once

#define QKV_CORE_API __attribute__((visibility("default")))
