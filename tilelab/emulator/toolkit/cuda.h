// Its declarations are in language.h already.
