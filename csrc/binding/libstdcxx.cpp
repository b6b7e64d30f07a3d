/* What the headers of gcc 9 to 12 use, but glibc 2.28 and its libstdc++ (gcc 8) do not have:
 * without these definitions a wheel would not load there. exports.map keeps them within the module.
 */
#define _GLIBCXX_EXTERN_TEMPLATE 0 /* the headers must not declare the instances extern */
#include <new>
#include <sstream>

#ifdef __GLIBCXX__
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

namespace std {
void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std

/* glibc 2.32: whether reference counts need no atomic operations. Here they always have them. */
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif
