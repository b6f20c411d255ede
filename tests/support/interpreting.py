"""Makes Triton's interpreter faster: the tests interpret thousands of launches."""

import functools


@functools.cache
def quickly() -> None:
    """Lets a launch replace Triton's language once, not again in each call of a device function: a third of the time.

    What a device function needs to have replaced beyond that is put back with the rest.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # a Triton that replaces the language in another way
        return
    replace, dtype_of, dtypes, replaced = interpreter._patch_lang, interpreter._get_np_dtype, {}, {}

    def replace_once(function):
        languages = {value.__name__ for value in function.__globals__.values() if value in (tl, tl.core)}
        if languages - replaced.keys():
            scope = replace(function)
            is_first, restore = not replaced, scope.restore
            replaced.update(dict.fromkeys(languages, restore))
            if is_first:
                scope.restore = restore_all
            return scope

    def restore_all():
        for restore in reversed(dict.fromkeys(replaced.values())):
            restore()
        replaced.clear()

    def dtype_by_name(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, dtype_by_name
