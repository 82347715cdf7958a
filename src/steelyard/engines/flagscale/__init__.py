"""Engine `flagscale`: training by FlagScale, a program that is started and watched. Framework
`program` is here too.
"""
