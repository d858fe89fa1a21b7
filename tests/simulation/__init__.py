"""Relays that run for days in seconds: the real code of the relay on a loop whose time is made up,
against a database and a broker made up too. One seed is one story, however often it is told.
"""
